"""A step record as the operator counts and shows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rljob_api.json_types import Json
from rljob_api.phases import LANES, PHASES
from rljob_api.wire.step_record import StepRecord
from rljob_operator.state.observed import StepView

OTHER = "other"
UNKNOWN = "unknown"
PHASE_LABELS = (*PHASES, OTHER, UNKNOWN)
"""All values of the `phase` label; a phase that this version does not know is counted under `unknown`."""
LANE_LABELS = (*LANES, UNKNOWN)
"""All values of the `lane` label."""

_LABELS = {name: name for name in PHASES}
Fingerprint = tuple[int, int, float, float]
"""(step, attempt, time, seconds): two records of one index that differ in it belong to different runs."""


def fingerprint(record: StepRecord) -> Fingerprint:
    """Identity of this record among the records of several runs."""
    return (record.step, record.attempt, record.time, record.step_seconds)


def by_index(records: Iterable[Json]) -> list[StepRecord]:
    """Records as JSON gives them, parsed and in the order of their index.

    Raises:
        WireError: one is not what the driver promises: it comes from whatever image the job runs.
    """
    return sorted(map(StepRecord.parse, records), key=lambda record: record.index)


def trainers_by_label(record: StepRecord) -> dict[str, float]:
    """The trainers' seconds by label of `PHASE_LABELS`."""
    return _whole(record.phases, record.other)


def lanes_by_label(record: StepRecord) -> dict[str, dict[str, float]]:
    """Seconds of what runs beside the trainers, by lane and label of `PHASE_LABELS`."""
    lanes: dict[str, dict[str, float]] = {}
    for name, phases in record.lanes.items():
        lane = lanes.setdefault(name if name in LANES else UNKNOWN, {})
        for label, seconds in _whole(phases, record.lane_other(name)).items():
            lane[label] = lane.get(label, 0.0) + seconds
    return lanes


def _whole(phases: Mapping[str, float], other: float) -> dict[str, float]:
    # The clock may be a rounding error below zero there.
    return {**_by_label(phases), OTHER: max(0.0, other)}


def _by_label(phases: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, seconds in phases.items():
        label = _LABELS.get(name, UNKNOWN)
        found[label] = found.get(label, 0.0) + seconds
    return found


def view_of(record: StepRecord) -> StepView:
    """Part of a record that the status shows."""
    return StepView(
        step=record.step,
        seconds=record.step_seconds,
        phases=_by_label(record.phases),
        switch_seconds=record.switch_seconds,
        reward=record.reward,
        log_prob_abs_diff=record.log_prob_abs_diff,
        time=record.time,
        weight_version=None if record.weights is None else record.weights.version,
        stopped_early=record.stopped_early,
    )
