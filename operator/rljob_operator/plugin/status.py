"""Output of `kubectl rljob status` and `list`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rljob_api import derived
from rljob_api.derived import ENGINE_GROUP, TRAINER_GROUP
from rljob_api.how_many import how_many
from rljob_api.looks import BAD, FAINT, GOOD, HEADING, WAITING
from rljob_api.safe_text import visible_line
from rljob_api.status import AttemptStatus, Goodput, JobPhase, Progress, RLJobStatus
from rljob_operator.kubernetes_objects import RLJobObject
from rljob_operator.plugin.bars import Step, draw_phases, draw_steps, progress_bar
from rljob_operator.plugin.terminal import Style, columns, number, seconds, wrapped
from rljob_operator.state.goodput import settled
from rljob_operator.state.observed import JobView
from rljob_operator.state.timing import duration_text, seconds_of, seconds_since

PHASE_LOOKS = {
    **dict.fromkeys((JobPhase.RUNNING.value, JobPhase.SUCCEEDED.value), GOOD),
    **dict.fromkeys(
        (JobPhase.QUEUED.value, JobPhase.STARTING.value, JobPhase.PENDING.value, JobPhase.SUSPENDED.value), WAITING
    ),
    JobPhase.FAILED.value: BAD,
}
_CONDITION_LOOKS = {"False": FAINT, "Unknown": WAITING}


def show_status(job: JobView, steps: Sequence[Step], source: str, now: float, style: Style) -> list[str]:
    """All that is worth knowing of one job.

    Args:
        job: the job with its status.
        steps: the last steps, oldest first.
        source: where they come from or why there are none, as a heading.
        now: Unix seconds.
        style: the terminal.
    """
    parts = [
        _summary(job, now, style),
        _records(source, steps, style),
        _section("Conditions", _conditions(job, now, style), style),
        _section("Attempts", _attempts(job, now, style), style),
        _section("Where the time went", _goodput(job, now, style), style),
    ]
    return [line for i, part in enumerate(part for part in parts if part) for line in ([""] * bool(i) + part)]


def show_list(items: Sequence[RLJobObject], with_namespace: bool, now: float) -> list[list[str]]:
    """The rows of `list`, headings first; read leniently, since one odd object must not hide the others."""
    heading = ["NAME", "PHASE", "STEP", "STEPS", "ETA", "REWARD", "STEP-SECONDS", "RESTARTS", "AGE"]
    rows = [["NAMESPACE", *heading] if with_namespace else heading]
    for item in items:
        meta, status = item["metadata"], _readable_status(item)
        progress = status.progress or Progress()
        row = [
            meta["name"],
            status.phase,
            status.progress and progress.step,
            (item.get("spec") or {}).get("steps"),
            progress.eta,
            number(progress.reward_mean),
            number(progress.step_seconds),
            status.restarts,
            duration_text(max(now - datetime.fromisoformat(meta["creationTimestamp"]).timestamp(), 0.0)),
        ]
        cells = ["-" if cell is None else visible_line(str(cell)) for cell in row]
        rows.append([meta["namespace"], *cells] if with_namespace else cells)
    return rows


def _readable_status(item: RLJobObject) -> RLJobStatus:
    try:
        return RLJobStatus.model_validate(item.get("status") or {})
    except ValueError:
        return RLJobStatus()


def _records(source: str, steps: Sequence[Step], style: Style) -> list[str]:
    heading = [style.paint(line, HEADING) for line in wrapped(source, style)]
    return [*heading, *draw_steps(steps, style), *([""] if steps else []), *draw_phases(steps, style)]


def _section(title: str, lines: Sequence[str], style: Style) -> list[str]:
    return [style.paint(title, HEADING), *lines] if lines else []


def _summary(job: JobView, now: float, style: Style) -> list[str]:
    status, spec = job.status, job.spec
    phase = (
        style.paint(status.phase.value, PHASE_LOOKS[status.phase.value])
        if status.phase
        else "not seen by the operator yet"
    )
    lines = [f"{style.paint(f'RLJob {job.namespace}/{job.name}', HEADING)}: {phase}"]
    if status.message:
        lines += wrapped(status.message, style, "  ")
    if job.problem:
        lines += wrapped(job.problem, style, "  ")
    progress = status.progress
    total = spec.steps if spec else (progress.steps if progress else 0)
    if progress and total:
        share = progress.step / total
        eta = f", about {progress.eta} left" if progress.eta and status.phase is JobPhase.RUNNING else ""
        lines.append(f"  {progress_bar(share, style, 24)} {progress.step} of {total} steps ({share:.0%}){eta}")
        lines += wrapped(_figures(progress, now), style, "  ")
    facts = [f"created {duration_text(max(now - job.created, 0.0))} ago"]
    if spec:
        groups = derived.node_groups(spec)
        of = {TRAINER_GROUP: " for trainers", ENGINE_GROUP: " for engines"}
        nodes = [
            f"{how_many(own.nodes, 'node')} with {how_many(own.devices, 'device')}{of.get(own.name, '')}"
            for own in groups
        ]
        facts.append(f"{' and '.join(nodes)}, {spec.resources.profile}")
        part = status.cluster.engine_nodes if status.cluster is not None else None
        if part is not None:
            all_nodes = how_many(derived.engine_nodes(spec), "node")
            facts.append(
                f"{part} of {all_nodes} for engines takes part"
                if part == 1
                else f"{part} of {all_nodes} for engines take part"
            )
    if status.queue:
        facts.append(f"queue {status.queue}")
    if status.restarts:
        facts.append(f"{status.restarts} of at most {spec.failure_policy.max_restarts if spec else '?'} restarts")
    return [*lines, *wrapped("; ".join(facts), style, "  ")]


def _figures(progress: Progress, now: float) -> str:
    last, saved = progress.last_step, progress.last_checkpoint
    parts = [f"reward {number(progress.reward_mean)}"] if progress.reward_mean is not None else []
    if progress.step_seconds is not None:
        parts.append(f"{seconds(progress.step_seconds)} a step")
    if last and last.log_prob_abs_diff is not None:
        parts.append(f"log-probability difference {number(last.log_prob_abs_diff)}")
    if saved:
        ago = f" ({duration_text(seconds_since(saved.time, now))} ago)" if saved.time else ""
        parts.append(f"checkpoint at step {saved.step}{ago}")
    return ", ".join(parts)


def _conditions(job: JobView, now: float, style: Style) -> list[str]:
    rows = [
        [c.type, c.status, c.reason, duration_text(seconds_since(c.last_transition_time, now)), c.message]
        for c in job.status.conditions
    ]
    return columns(rows, style, looks=_CONDITION_LOOKS)


def _attempts(job: JobView, now: float, style: Style) -> list[str]:
    return columns([_attempt(attempt, now) for attempt in job.status.attempts], style)


def _attempt(attempt: AttemptStatus, now: float) -> list[str]:
    begin, end = attempt.start_time, attempt.end_time
    lasted = "" if begin is None else duration_text(seconds_since(begin, seconds_of(end) if end else now))
    first = "" if attempt.start_step is None else str(attempt.start_step)
    steps = f"steps {first}-{'' if attempt.end_step is None else attempt.end_step}" if first else ""
    if end is None:
        return [str(attempt.number), lasted, steps, "", "runs"]
    code = "" if attempt.exit_code is None else f"exit {attempt.exit_code}"
    counted = " It counts as a restart." if attempt.counted else ""
    return [str(attempt.number), lasted, steps, code, f"{attempt.reason or 'ended'}: {attempt.message or ''}{counted}"]


def _goodput(job: JobView, now: float, style: Style) -> list[str]:
    if job.status.goodput is None:
        return []
    spent = _spent(settled(job.status, now))
    whole = sum(spent.values())
    devices = derived.devices(job.spec) if job.spec else 0
    room = max(min(style.width - 64, 24), 4)
    lines = []
    for name, value in spent.items() if whole else ():
        parts = [duration_text(value)]
        if devices and name != "queued":
            parts.append(f"{value * devices / 3600:.1f} device-hours")
        if name == "lost" and job.status.goodput.lost_steps:
            parts.append(f"{how_many(job.status.goodput.lost_steps, 'step')} ran again")
        share = value / whole
        lines.append(f"  {name:<8} {share:6.1%} {progress_bar(share, style, room)} {', '.join(parts)}")
    return lines


def _spent(goodput: Goodput) -> dict[str, float]:
    """Seconds by what they were spent on."""
    in_steps = goodput.useful_seconds + goodput.lost_seconds
    return {
        "useful": goodput.useful_seconds,
        "lost": goodput.lost_seconds,
        "overhead": max(goodput.running_seconds - in_steps, 0.0),
        "starting": goodput.starting_seconds,
        "queued": goodput.queued_seconds,
    }
