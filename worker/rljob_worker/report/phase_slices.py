"""Phases of a run on the clock: begins by the driver's events, lengths by the step records."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rljob_api.phases import TRAINER_LANE
from rljob_api.wire.step_record import StepRecord

_SLACK_SECONDS = 0.01
"""The first step of an attempt may have begun by so much before what its record's time and length make of it."""


@dataclass(slots=True)
class PhaseSlice:
    """A piece of a phase within one step, or of one that no record has."""

    phase: str
    begin: float
    seconds: float
    """From Unix seconds on."""
    record: StepRecord | None
    """Record of its step; None: the attempt ended before, or has not got so far."""
    by_length: bool = False
    """Its begin is not known: the step's phases of the lane follow one another."""


@dataclass(frozen=True, slots=True)
class _Step:
    begin: float
    record: StepRecord


def phase_slices(
    events: Sequence[Mapping[str, Any]], records: Sequence[StepRecord], end: float
) -> dict[str, list[PhaseSlice]]:
    """The phases of one attempt by lane, in their order.

    In a lane they do not overlap, and those of a step and phase are together as long as the step's record says. By
    events alone each would be longer by the time of writing one, and none would end where its step does.

    Args:
        events: of the attempt, in order.
        records: of its steps, in order.
        end: Unix seconds of the last that is known of it.
    """
    steps = list(_bounds(records))
    begun: dict[str, list[Mapping[str, Any]]] = {TRAINER_LANE: []}
    for record in records:
        for lane in record.lanes:
            begun.setdefault(lane, [])
    for event in events:
        if event["event"] == "phase":
            begun.setdefault(str(event.get("lane", TRAINER_LANE)), []).append(event)
    return {
        lane: list(_placed(_lengths(_cut(told, steps, end, beside=lane != TRAINER_LANE), steps, lane)))
        for lane, told in begun.items()
    }


def _bounds(records: Sequence[StepRecord]) -> Iterator[_Step]:
    """A step begins where the one before it ended."""
    before = None
    for record in records:
        yield _Step(record.time - record.step_seconds - _SLACK_SECONDS if before is None else before, record)
        before = record.time


def _cut(
    told: Sequence[Mapping[str, Any]], steps: Sequence[_Step], end: float, *, beside: bool
) -> Iterator[PhaseSlice]:
    """Slices between the events of a lane, cut where steps begin and end.

    Only what runs beside the trainers goes on in the next step.
    """
    at = 0
    for event, after in itertools.zip_longest(told, told[1:]):
        begin = float(event["time"])
        # Events of older versions do not say when the phase ended.
        last = end if after is None else float(after["time"]) - float(after.get("gap", 0.0))
        while True:
            while at < len(steps) and steps[at].record.time <= begin:
                at += 1
            step = steps[at] if at < len(steps) else None
            edge = last
            if step is not None:
                edge = min(last, step.begin if begin < step.begin else step.record.time)
            inside = step is not None and begin >= step.begin
            record = step.record if step is not None and inside else None
            yield PhaseSlice(event["phase"], begin, max(0.0, edge - begin), record)
            if edge >= last or (inside and not beside):
                break
            begin = edge


def _lengths(slices: Iterator[PhaseSlice], steps: Sequence[_Step], lane: str) -> Iterator[PhaseSlice]:
    """Give those of each step the seconds of its record."""
    by_step: dict[int, list[PhaseSlice]] = defaultdict(list)
    loose: list[PhaseSlice] = []
    for one in slices:
        (loose if one.record is None else by_step[one.record.step]).append(one)
    for step in steps:
        yield from _of_step(by_step[step.record.step], step, lane)
    yield from loose


def _of_step(slices: Sequence[PhaseSlice], step: _Step, lane: str) -> Iterator[PhaseSlice]:
    record = step.record
    recorded = record.phases if lane == TRAINER_LANE else record.lanes.get(lane, {})
    whole: dict[str, float] = defaultdict(float)
    for one in slices:
        whole[one.phase] += one.seconds
    if any(seconds > 0.0 and not whole[phase] for phase, seconds in recorded.items()):
        # Events were lost, or the machine's clock was set.
        begin = record.time - record.step_seconds
        for phase, seconds in recorded.items():
            yield PhaseSlice(phase, begin, seconds, record, by_length=True)
            begin += seconds
        return
    for one in slices:
        if seconds := recorded.get(one.phase, 0.0):
            one.seconds *= seconds / whole[one.phase]
            yield one


def _placed(slices: Iterator[PhaseSlice]) -> Iterator[PhaseSlice]:
    """Move a slice behind the one before it: events and seconds come from two clocks."""
    end = 0.0
    for one in sorted(slices, key=lambda one: one.begin):
        one.begin = max(one.begin, end)
        end = one.begin + one.seconds
        yield one
