"""`report.html` and `report.png` of a run folder."""

from __future__ import annotations

import base64
import html
import statistics
from pathlib import Path

from rljob_api import metrics as m
from rljob_api.safe_text import visible
from rljob_api.wire.run_status import RunDescription
from rljob_api.wire.step_record import StepRecord
from rljob_worker.errors import UserError
from rljob_worker.host.files import write_whole
from rljob_worker.records.event_lines import read_events
from rljob_worker.records.run_files import require_run_folder
from rljob_worker.records.steps import effective_steps, read_steps
from rljob_worker.records.summary import phase_table
from rljob_worker.records.trajectories import read_trajectories, trajectory_files
from rljob_worker.report.gantt import draw_gantt, gantt_of
from rljob_worker.report.page import document, sample_table, table
from rljob_worker.report.plot import plot_run
from rljob_worker.report.text import number
from rljob_worker.report.tokens import token_rows

_LANE_STEPS = 5


def build_report(run_folder: Path, steps: range | None = None) -> tuple[Path, Path]:
    """Write the report from the run's records; returns the HTML and the PNG file.

    Args:
        run_folder: of the run.
        steps: whose phases are drawn instant by instant, in `lanes.png`; by default five in the middle of a run that
            has several lanes.

    Raises:
        UserError: not a run folder, or the run has no step record yet, or no event of the steps asked for.
    """
    run = require_run_folder(run_folder)
    everything = read_steps(run_folder)
    drawn = effective_steps(everything)
    records, kept = ([record for record in some if record.is_step] for some in (everything, drawn))
    if not kept:
        raise UserError(f"{run_folder}: no step was finished yet, there is nothing to report")
    name, wanted = visible(run.name), run.spec["steps"]
    png = plot_run(drawn, f"{name}: {kept[-1].step} of {wanted} steps", run_folder / "report.png")
    page = run_folder / "report.html"
    lanes = _lanes(run_folder, kept, steps)
    # The manifest in it may name keys among its variables.
    write_whole(page, _page(name, run, records, kept, png, lanes, run_folder), private=True)
    return page, png


def _middle(kept: list[StepRecord]) -> range | None:
    """Steps that show how lanes go together."""
    if not any(record.lanes for record in kept):
        return None
    first = kept[max(0, (len(kept) - _LANE_STEPS) // 2)].step
    return range(first, min(first + _LANE_STEPS, kept[-1].step + 1))


def _lanes(folder: Path, kept: list[StepRecord], asked: range | None) -> str:
    """What each lane did in some steps, as HTML; UserError where these were asked for and no event tells it."""
    steps = asked or _middle(kept)
    if steps is None:
        return ""
    try:
        gantt = gantt_of(read_events(folder), steps)
    except UserError as error:
        if asked:
            raise
        # Events that were lost take nothing from what the records say.
        return f"<p>What each lane did cannot be drawn: {html.escape(visible(str(error)))}</p>"
    shown = f"step {steps.start}" if len(gantt.steps) == 1 else f"steps {steps.start} to {gantt.steps[-1]}"
    picture = draw_gantt(gantt, f"What each lane did in {shown}", folder / "lanes.png")
    return _image(picture, "phases of each lane")


def _page(
    name: str,
    run: RunDescription,
    records: list[StepRecord],
    kept: list[StepRecord],
    png: Path,
    lanes: str,
    folder: Path,
) -> str:
    parts = [
        table([], _facts(run, records, kept)),
        _image(png, "reward, phase seconds, training metrics"),
        "<h2>Phases</h2>",
        lanes,
        _phases(kept),
        _tokens(kept),
        _examples(folder),
    ]
    return document(name, parts, run.job)


def _image(png: Path, alt: str) -> str:
    return f'<img alt="{alt}" src="data:image/png;base64,{base64.b64encode(png.read_bytes()).decode()}"/>'


def _facts(run: RunDescription, records: list[StepRecord], kept: list[StepRecord]) -> list[list[str]]:
    step, switch, other = (
        statistics.median(values)
        for values in zip(*((r.step_seconds, r.switch_seconds, r.other) for r in kept), strict=True)
    )
    rewards = [number(record.reward) for record in (kept[0], kept[-1])]
    tokens = [r.metric(m.RESPONSE_TOKENS_KEY) for r in kept]
    seconds = sum(_rollout(r) for r, count in zip(kept, tokens, strict=True) if count is not None)
    syncs = [record.weights for record in records if record.weights is not None]
    facts = {
        "steps": f"{kept[-1].step} of {run.spec['steps']}",
        **({"stopped early": visible(kept[-1].stopped_early)} if kept[-1].stopped_early else {}),
        "attempts": str(run.attempt),
        "steps lost to restarts": str(len(records) - len(kept)),
        "mean reward, first and last step": ", ".join(rewards),
        "seconds a step, median": number(step),
        "of which switching devices over": f"{number(switch)} ({100 * switch / step:.1f} %)",
        "of which in no phase (other)": f"{number(other)} ({100 * other / step:.1f} %)",
        "response tokens a second of rollout": f"{sum(filter(None, tokens)) / seconds:,.0f}" if seconds else "-",
        "of rollout with fewer than half of its places busy": _tail(kept),
        "weight syncs verified": f"{sum(sync.verified for sync in syncs)} of {len(syncs)}",
    }
    return [[name, value] for name, value in facts.items()]


def _rollout(record: StepRecord) -> float:
    """Seconds that the engines generated for, in whichever lane."""
    return sum(phases.get("rollout", 0.0) for phases in (record.phases, *record.lanes.values()))


def _phases(kept: list[StepRecord]) -> str:
    rows = [
        [
            row.phase,
            f"{row.median * 1000:.1f}",
            f"{row.p95 * 1000:.1f}",
            f"{row.total:.2f}",
            f"{row.share * 100:.1f} %",
            str(row.steps),
        ]
        for row in phase_table(kept)
    ]
    return table(["phase", "median ms", "p95 ms", "total s", "share", "steps"], rows)


def _tokens(kept: list[StepRecord]) -> str:
    rows = token_rows(kept)
    return f"<h2>Tokens</h2>\n{table(['sampled tokens', 'count', 'share'], rows)}" if rows else ""


def _tail(kept: list[StepRecord]) -> str:
    """The part of all rollouts in which fewer than half of the engines' places were busy, in percent."""
    shares = [(r.metric(m.ROLLOUT_TAIL_KEY), r.phases.get("rollout", 0.0)) for r in kept]
    seconds = sum(took for share, took in shares if share is not None)
    tail = sum(share * took for share, took in shares if share is not None)
    return f"{100 * tail / seconds:.1f} %" if seconds else "-"


def _examples(folder: Path) -> str:
    if not trajectory_files(folder):
        return ""
    step, samples = read_trajectories(folder)
    return f"<h2>Worst and best samples of step {step}</h2>\n{sample_table(samples)}"
