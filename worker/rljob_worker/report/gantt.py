"""Phases of some steps on the clock, lane by lane."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rljob_api.looks import PHASE_COLORS
from rljob_api.phases import PHASES, TRAINER_LANE
from rljob_worker.errors import UserError
from rljob_worker.host.files import replacing, this_thread

_NARROWEST_LABEL = 0.05
"""Share of the picture's width from which on a bar has its phase's name on it."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A phase of a lane; seconds since the first of the steps began."""

    lane: str
    phase: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Gantt:
    """Some steps of one attempt."""

    steps: range
    bars: Sequence[Bar]
    bounds: Sequence[float]
    """When each step began, and when the last ended, on the scale of the bars."""


def gantt_of(events: Iterable[dict[str, Any]], steps: range) -> Gantt:
    """Phases of steps from the driver's events, of the newest attempt that began the first of them.

    An event tells when a phase began, and how long before that its lane's last one ended; the events of older versions
    do not tell the latter: what was in no phase is in the bar before it then.

    Args:
        events: of the run, in order; each has the number of the step that was recorded last.
        steps: their numbers.

    Raises:
        UserError: no event is of these steps.
    """
    told = list(events)
    attempts = {event["attempt"] for event in told if _begins(event, steps.start)}
    if not attempts:
        raise UserError(f"events.jsonl: the run has not begun step {steps.start}, or says nothing of it")
    told = [event for event in told if event["attempt"] == max(attempts)]
    begun = [time for number in range(steps.start, steps.stop + 1) if (time := _first_of(told, number)) is not None]
    # The last step of a run is followed by no other.
    bounds = begun if len(begun) > len(steps) else [*begun, float(told[-1]["time"])]
    lanes: dict[str, list[dict[str, Any]]] = {TRAINER_LANE: []}
    for event in told:
        if event["event"] == "phase":
            lanes.setdefault(event.get("lane", TRAINER_LANE), []).append(event)
    first, last = bounds[0], bounds[-1]
    ends = {lane: [one["time"] - one.get("gap", 0.0) for one in phases[1:]] for lane, phases in lanes.items()}
    bars = [
        Bar(lane, one["phase"], max(one["time"], first) - first, min(end, last) - first)
        for lane, phases in lanes.items()
        for one, end in zip(phases, [*ends[lane], last], strict=True)
        if one["time"] < last and end > first
    ]
    return Gantt(range(steps.start, steps.start + len(bounds) - 1), bars, [bound - first for bound in bounds])


def draw_gantt(gantt: Gantt, title: str, path: Path) -> Path:
    """Draw it into a PNG file, a row for each lane."""
    lanes = list(dict.fromkeys(bar.lane for bar in gantt.bars))
    figure = Figure(figsize=(12, 1.4 + 0.7 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    width = gantt.bounds[-1]
    for bar in gantt.bars:
        row, seconds = lanes.index(bar.lane), bar.end - bar.begin
        axes.broken_barh([(bar.begin, seconds)], (row - 0.4, 0.8), color=PHASE_COLORS[bar.phase], lw=0)
        if seconds > _NARROWEST_LABEL * width:
            axes.text(bar.begin + seconds / 2, row, bar.phase, ha="center", va="center", fontsize="x-small")
    for number, (begin, end) in zip(gantt.steps, itertools.pairwise(gantt.bounds)):
        axes.axvline(begin, color="black", lw=0.8, ls=":")
        axes.text((begin + end) / 2, -0.5, f"step {number}", ha="center", va="bottom", fontsize="small")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set(xlim=(0, width), ylim=(len(lanes) - 0.4, -0.9), xlabel="seconds")
    axes.set_title(title, fontsize="medium")
    drawn = {bar.phase for bar in gantt.bars}
    patches = [Patch(color=PHASE_COLORS[name], label=name) for name in PHASES if name in drawn]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize="small", frameon=False)
    with replacing(path, durable=False, writer=this_thread()) as file:
        figure.savefig(file, dpi=110, format="png")
    return path


def _begins(event: dict[str, Any], step: int) -> bool:
    """Whether the trainers entered a phase in that step: the record of the one before is written."""
    return event["event"] == "phase" and "lane" not in event and event["step"] == step - 1


def _first_of(events: Sequence[dict[str, Any]], step: int) -> float | None:
    return next((float(event["time"]) for event in events if _begins(event, step)), None)
