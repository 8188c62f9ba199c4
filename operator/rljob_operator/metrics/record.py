"""A step record as the operator counts it. It is checked first: it comes from whatever image the job runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rljob_api import metrics as m
from rljob_api.phases import PHASES
from rljob_operator.state.observed import StepView

OTHER = "other"
UNKNOWN = "unknown"
PHASE_LABELS = (*PHASES, OTHER, UNKNOWN)
"""All values of the `phase` label; a phase that this version does not know is counted under `unknown`."""

_LABELS = {name: name for name in PHASES}
_LARGEST_INT = 2**53
_LARGEST = 1e300
_LONGEST_SECONDS = 1e9
"""Thirty years: sums of such times, and times the steps that are left, are numbers that the status can hold."""


class RecordError(ValueError):
    """A step record is not what the driver promises; names the record and the field."""


Fingerprint = tuple[int, int, float, float]
"""(step, attempt, time, seconds): two records of one index that differ in it belong to different runs."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What is counted of one record."""

    index: int
    attempt: int
    view: StepView
    phases: Mapping[str, float]
    """Seconds by label of `PHASE_LABELS`."""
    applied: bool
    """False: the step's update was refused, so that the step is not completed."""
    rerun: bool
    verified: bool
    """False when the record says that its weight sync was not verified."""
    sync_bytes: float
    """NaN without a sync, as all gauges without a value."""
    response_length: float
    memory_block: Mapping[str, Any]
    """As it stands in the record: only the newest record's is looked into, with `memory`."""

    @property
    def fingerprint(self) -> Fingerprint:
        """What tells this record from one of another run."""
        return (self.view.step, self.attempt, self.view.time, self.view.seconds)


def parse(record: Any) -> StepRecord:
    """Read one record as JSON gives it; RecordError when a field that is counted is missing or no such value."""
    if not isinstance(record, dict):
        raise RecordError(f"a step record must be an object, not {type(record).__name__}")
    index = _whole(record, "index", "a step record")
    where = f"step record {index}"
    step = _whole(record, "step", where)
    phases = _phases(record, where)
    metrics, weights = _block(record, "metrics", where), _block(record, "weights", where)
    version = weights.get("version")
    view = StepView(
        step=step,
        seconds=_seconds(record.get("step_seconds"), f"{where}: step_seconds"),
        phases={name: seconds for name, seconds in phases.items() if name != OTHER},
        switch_seconds=_seconds(record.get("switch_seconds", 0.0), f"{where}: switch_seconds"),
        reward=_optional(metrics.get(m.REWARD_KEY), f"{where}: metrics.{m.REWARD_KEY}"),
        log_prob_abs_diff=_optional(metrics.get(m.LOGPROB_KEY), f"{where}: metrics.{m.LOGPROB_KEY}"),
        time=_number(record.get("time"), f"{where}: time"),
        weight_version=None if version is None else _whole(weights, "version", f"{where}: weights"),
    )
    size = _optional(weights.get("bytes"), f"{where}: weights.bytes")
    length = _optional(metrics.get(m.RESPONSE_LENGTH_KEY), f"{where}: metrics.{m.RESPONSE_LENGTH_KEY}")
    return StepRecord(
        index=index,
        attempt=_whole(record, "attempt", where),
        view=view,
        phases=phases,
        applied=record.get("applied", True) is not False,
        rerun=record.get("rerun", False) is True,
        verified=weights.get("verified", True) is not False,
        sync_bytes=math.nan if size is None else size,
        response_length=math.nan if length is None else length,
        memory_block=_block(record, "memory", where),
    )


def _phases(record: Mapping[str, Any], where: str) -> dict[str, float]:
    phases: dict[str, float] = {}
    for name, value in _block(record, "phases", where).items():
        label = _LABELS.get(name, UNKNOWN)
        phases[label] = phases.get(label, 0.0) + _seconds(value, f"{where}: phases.{name[:80]}")
    # The clock may be a rounding error below zero here.
    phases[OTHER] = max(0.0, _number(record.get("other"), f"{where}: other"))
    return phases


def memory(record: StepRecord) -> dict[tuple[str, str, str], float]:
    """Bytes by (process, rank, state); RecordError when the block is not as the driver promises."""
    where = f"step record {record.index}"
    for process, reports in record.memory_block.items():
        if not isinstance(reports, dict) or not all(isinstance(report, dict) for report in reports.values()):
            raise RecordError(f"{where}: memory.{process[:80]} must hold an object for each phase")
    states = m.memory_states(record.memory_block)
    return {(p, rank, state): _number(value, f"{where}: memory.{p}-{rank}") for p, rank, state, value in states}


def _block(record: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = record.get(name)
    if not isinstance(value, dict):
        raise RecordError(f"{where}: {name} must be an object, not {_shown(value)}")
    return value


def _whole(record: Mapping[str, Any], name: str, where: str) -> int:
    value = record.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST_INT:
        raise RecordError(f"{where}: {name} must be a whole number from 0, not {_shown(value)}")
    return value


def _number(value: Any, where: str) -> float:
    """A finite number; Python's JSON reader also lets NaN, infinities and integers of any size through."""
    if isinstance(value, float | int) and -_LARGEST < value < _LARGEST and not isinstance(value, bool):
        return float(value)
    raise RecordError(f"{where} must be a finite number, not {_shown(value)}")


def _optional(value: Any, where: str) -> float | None:
    return None if value is None else _number(value, where)


def _seconds(value: Any, where: str) -> float:
    seconds = _number(value, where)
    if seconds < 0:
        raise RecordError(f"{where} must not be negative, but is {seconds:g}")
    if seconds > _LONGEST_SECONDS:
        raise RecordError(f"{where} must be at most {_LONGEST_SECONDS:g}, but is {seconds:g}")
    return seconds


def _shown(value: Any) -> str:
    if value is None or isinstance(value, str | float | bool):
        return repr(value)[:40]
    # Python refuses to write out an integer of thousands of digits.
    return str(value) if isinstance(value, int) and abs(value) < _LARGEST_INT else type(value).__name__


def by_index(records: Iterable[Any]) -> list[StepRecord]:
    """Parsed records in the order of their index; RecordError as in `parse`."""
    return sorted(map(parse, records), key=lambda record: record.index)
