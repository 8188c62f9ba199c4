"""A step record as the operator counts and shows it."""

from __future__ import annotations

from collections.abc import Iterable

from rljob_api.json_types import Json
from rljob_api.phases import PHASES
from rljob_api.wire.step_record import StepRecord
from rljob_operator.state.observed import StepView

OTHER = "other"
UNKNOWN = "unknown"
PHASE_LABELS = (*PHASES, OTHER, UNKNOWN)
"""All values of the `phase` label; a phase that this version does not know is counted under `unknown`."""

_LABELS = {name: name for name in PHASES}
Fingerprint = tuple[int, int, float, float]
"""(step, attempt, time, seconds): two records of one index that differ in it belong to different runs."""


def fingerprint(record: StepRecord) -> Fingerprint:
    """What tells this record from one of another run."""
    return (record.step, record.attempt, record.time, record.step_seconds)


def by_index(records: Iterable[Json]) -> list[StepRecord]:
    """Records as JSON gives them, parsed and in the order of their index.

    Raises:
        WireError: one is not what the driver promises: it comes from whatever image the job runs.
    """
    return sorted(map(StepRecord.parse, records), key=lambda record: record.index)


def phases_by_label(record: StepRecord) -> dict[str, float]:
    """Seconds by label of `PHASE_LABELS`, `other` not among them."""
    phases: dict[str, float] = {}
    for name, seconds in record.phases.items():
        label = _LABELS.get(name, UNKNOWN)
        phases[label] = phases.get(label, 0.0) + seconds
    return phases


def view_of(record: StepRecord) -> StepView:
    """What the status shows of a record."""
    return StepView(
        step=record.step,
        seconds=record.step_seconds,
        phases=phases_by_label(record),
        switch_seconds=record.switch_seconds,
        reward=record.reward,
        log_prob_abs_diff=record.log_prob_abs_diff,
        time=record.time,
        weight_version=None if record.weights is None else record.weights.version,
        stopped_early=record.stopped_early,
    )
