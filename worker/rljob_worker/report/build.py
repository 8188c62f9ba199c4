"""`report.html` and `report.png` of a run folder."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rljob_api import metrics as m
from rljob_api.json_types import JsonObject
from rljob_api.safe_text import visible
from rljob_api.wire.run_status import RunDescription
from rljob_api.wire.step_record import StepRecord
from rljob_worker.errors import UserError
from rljob_worker.host.files import this_thread, write_whole
from rljob_worker.records.event_lines import read_events
from rljob_worker.records.run_files import require_run_folder
from rljob_worker.records.steps import effective_steps, read_steps
from rljob_worker.records.summary import phase_table
from rljob_worker.records.trajectories import read_trajectories, trajectory_files
from rljob_worker.report.gantt import draw_gantt, gantt_of
from rljob_worker.report.page import FileLink, Heading, Paragraph, Part, Place, Table, document, picture, sample_table
from rljob_worker.report.page_data import run_data, sample_data, sample_steps
from rljob_worker.report.plot import plot_run
from rljob_worker.report.text import number
from rljob_worker.report.tokens import token_rows
from rljob_worker.report.trace import TRACE_FILE, build_trace

_LANE_STEPS = 5
_CURVES = "reward, phase seconds, training metrics"
_TRACE = (
    ": the run as a trace, with each phase and process on one clock. Open it at https://ui.perfetto.dev, which keeps "
    "it in the browser, or where there is no network at chrome://tracing in Chrome, Chromium or Edge."
)


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder, as its report shows it."""

    folder: Path
    about: RunDescription
    every: Sequence[StepRecord]
    """Records of each executed step."""
    drawn: Sequence[StepRecord]
    """Each step once, an evaluation before the first among them."""

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Read the records; UserError where it is no run folder, or no step was finished yet."""
        about, records = require_run_folder(folder), read_steps(folder)
        run = cls(folder, about, [record for record in records if record.is_step], effective_steps(records))
        if not run.kept:
            raise UserError(f"{folder}: no step was finished yet, there is nothing to report")
        return run

    @property
    def kept(self) -> list[StepRecord]:
        """The steps, each once."""
        return [record for record in self.drawn if record.is_step]


def build_report(run_folder: Path, steps: range | None = None, beside: Path | None = None) -> tuple[Path, Path]:
    """Write the report from the run's records, and the trace that it links to; returns the HTML and the PNG file.

    Args:
        run_folder: of the run.
        steps: whose phases are drawn instant by instant, in `lanes.png`; by default five in the middle of a run that
            has several lanes.
        beside: folder of another run, whose curves are drawn in the same charts.

    Raises:
        UserError: not a run folder, or the run has no step record yet, or no event of the steps asked for.
    """
    run = Run.read(run_folder)
    runs = [run, *([Run.read(beside)] if beside is not None else [])]
    title = f"{visible(run.about.name)}: {run.kept[-1].step} of {run.about.spec['steps']} steps"
    png = plot_run(run.drawn, title, run_folder / "report.png")
    page = run_folder / "report.html"
    data = {**page_data(runs), "samples": sample_data(run_folder)}
    # The manifest in it may name keys among its variables.
    text = _page(runs, png, _lanes(run, steps), _trace(run_folder), data)
    write_whole(page, text, writer=this_thread(), private=True)
    return page, png


def page_data(runs: Sequence[Run]) -> JsonObject:
    """The content of the page's scripts, but for the samples of the first run."""
    names = [run.about.name for run in runs]
    if len({*names}) < len(names):
        names = [str(run.folder) for run in runs]
    return {"runs": [run_data(name, run.drawn) for name, run in zip(names, runs)], "live": False}


def live_page(runs: Sequence[Run], version: str) -> str:
    """The page that `rljob view` serves: it asks for samples and for what is new.

    Args:
        runs: the run, and perhaps another beside it.
        version: of their records, as `run.json` tells it.
    """
    data = {**page_data(runs), "samples": sample_steps(runs[0].folder), "live": True, "version": version}
    return _page(runs, None, [], FileLink(TRACE_FILE, _TRACE, "trace"), data)


def _trace(folder: Path) -> Part:
    """Write the trace; events that were lost take nothing from what the records say."""
    try:
        build_trace(folder, folder / TRACE_FILE)
    except UserError as error:
        return Paragraph(f"The run cannot be drawn as a trace: {error}")
    return FileLink(TRACE_FILE, _TRACE)


def _middle(kept: list[StepRecord]) -> range | None:
    """Steps that show how lanes go together."""
    if not any(record.lanes for record in kept):
        return None
    first = kept[max(0, (len(kept) - _LANE_STEPS) // 2)].step
    return range(first, min(first + _LANE_STEPS, kept[-1].step + 1))


def _lanes(run: Run, asked: range | None) -> list[Part]:
    """Phases of each lane in some steps; UserError where these were asked for and no event has them."""
    steps = asked or _middle(run.kept)
    if steps is None:
        return []
    try:
        gantt = gantt_of(read_events(run.folder), steps)
    except UserError as error:
        if asked:
            raise
        # Events that were lost take nothing from what the records say.
        return [Paragraph(f"What each lane did cannot be drawn: {error}")]
    shown = f"step {steps.start}" if len(gantt.steps) == 1 else f"steps {steps.start} to {gantt.steps[-1]}"
    drawn = draw_gantt(gantt, f"What each lane did in {shown}", run.folder / "lanes.png")
    return [picture(drawn, "phases of each lane")]


def _page(runs: Sequence[Run], png: Path | None, lanes: Sequence[Part], trace: Part, data: JsonObject) -> str:
    run = runs[0]
    parts = [
        _facts(runs),
        Place("charts"),
        *([] if png is None else [picture(png, _CURVES, fallback=True)]),
        Heading("Phases"),
        *lanes,
        _phases(run.kept),
        *_tokens(run.kept),
        *_samples(run.folder),
        Heading("Trace"),
        trace,
    ]
    return document(run.about.name, parts, run.about.job, data)


def _facts(runs: Sequence[Run]) -> Table:
    columns = [_facts_of(run) for run in runs]
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in {n: 0 for c in columns for n in c}]
    return Table(["", *(str(run.folder) for run in runs)] if len(runs) > 1 else [], rows)


def _facts_of(run: Run) -> dict[str, str]:
    kept = run.kept
    step, switch, other = (
        statistics.median(values)
        for values in zip(*((r.step_seconds, r.switch_seconds, r.other) for r in kept), strict=True)
    )
    rewards = [number(record.reward) for record in (kept[0], kept[-1])]
    tokens = [r.metric(m.RESPONSE_TOKENS_KEY) for r in kept]
    seconds = sum(_rollout(r) for r, count in zip(kept, tokens, strict=True) if count is not None)
    syncs = [record.weights for record in run.every if record.weights is not None]
    return {
        "steps": f"{kept[-1].step} of {run.about.spec['steps']}",
        **({"stopped early": kept[-1].stopped_early} if kept[-1].stopped_early else {}),
        "attempts": str(run.about.attempt),
        "steps lost to restarts": str(len(run.every) - len(kept)),
        "mean reward, first and last step": ", ".join(rewards),
        "seconds a step, median": number(step),
        "of which switching devices over": _of(switch, step),
        "of which in no phase (other)": _of(other, step),
        "response tokens a second of rollout": f"{sum(filter(None, tokens)) / seconds:,.0f}" if seconds else "-",
        "of rollout with fewer than half of its places busy": _tail(kept),
        "weight syncs verified": f"{sum(sync.verified for sync in syncs)} of {len(syncs)}",
    }


def _of(part: float, whole: float) -> str:
    """A part and its share, whose sign stays on its line."""
    return f"{number(part)} ({100 * part / whole:.1f}\u00a0%)"


def _rollout(record: StepRecord) -> float:
    """Seconds that the engines generated for, in whichever lane."""
    return sum(phases.get("rollout", 0.0) for phases in (record.phases, *record.lanes.values()))


def _phases(kept: list[StepRecord]) -> Table:
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
    return Table(["phase", "median ms", "p95 ms", "total s", "share", "steps"], rows, name="phases")


def _tokens(kept: list[StepRecord]) -> list[Part]:
    rows = token_rows(kept)
    return [Heading("Tokens"), Table(["sampled tokens", "count", "share"], rows)] if rows else []


def _tail(kept: list[StepRecord]) -> str:
    """The part of all rollouts in which fewer than half of the engines' places were busy, in percent."""
    shares = [(r.metric(m.ROLLOUT_TAIL_KEY), r.phases.get("rollout", 0.0)) for r in kept]
    seconds = sum(took for share, took in shares if share is not None)
    tail = sum(share * took for share, took in shares if share is not None)
    return f"{100 * tail / seconds:.1f} %" if seconds else "-"


def _samples(folder: Path) -> list[Part]:
    if not trajectory_files(folder):
        return []
    step, samples = read_trajectories(folder)
    shown: list[Part] = [Heading(f"Worst and best samples of step {step}"), sample_table(samples)]
    return [*shown, Heading("All samples"), Place("samples")]
