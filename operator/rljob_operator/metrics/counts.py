"""Sums over the step records of a run folder. Only the values of the last record are kept."""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from rljob_api import metrics as m
from rljob_api.reward_parts import PartNames
from rljob_api.wire.step_record import StepRecord
from rljob_operator.metrics.exposition import labels
from rljob_operator.metrics.record import (
    PHASE_LABELS,
    Fingerprint,
    fingerprint,
    lanes_by_label,
    trainers_by_label,
    view_of,
)
from rljob_operator.state.observed import StepView

RECENT_STEPS = 20
"""The median step time is over so many."""

_WIDTH = len(m.SECONDS_BUCKETS) + 1
_STEP_ROW = len(PHASE_LABELS)
_ROW = {label: row for row, label in enumerate(PHASE_LABELS)}


@dataclass(frozen=True, slots=True)
class DriverTotals:
    """The part of `DriverView` that comes from the records."""

    last: StepView | None = None
    median_step_seconds: float | None = None
    """Over the last 20 executed steps."""
    useful_seconds: float = 0.0
    """Sum over steps executed for the first time."""
    lost_seconds: float = 0.0
    """Sum over steps executed again: what running them the first time was worth nothing."""
    lost_steps: int = 0


@dataclass(frozen=True, slots=True)
class Histogram:
    """One series of a histogram."""

    cumulative: tuple[int, ...]
    """Observations up to each bound of `SECONDS_BUCKETS`, then all of them."""
    sum: float

    @property
    def count(self) -> int:
        """All observations."""
        return self.cumulative[-1]


class _Histograms:
    """A histogram of seconds for each of some rows."""

    __slots__ = ("_buckets", "_sums")

    def __init__(self, rows: int) -> None:
        self._buckets = array("Q", bytes(8 * _WIDTH * rows))
        self._sums = array("d", bytes(8 * rows))

    def observe(self, row: int, seconds: float) -> None:
        self._buckets[row * _WIDTH + bisect_left(m.SECONDS_BUCKETS, seconds)] += 1
        self._sums[row] += seconds

    def observe_phases(self, seconds: Mapping[str, float]) -> None:
        """One step's, by label."""
        for label, value in seconds.items():
            self.observe(_ROW[label], value)

    def of(self, row: int) -> Histogram:
        return Histogram(tuple(accumulate(self._buckets[row * _WIDTH : (row + 1) * _WIDTH])), self._sums[row])

    def phases(self) -> Iterator[tuple[str, Histogram]]:
        """Histograms of the phases that ever ran, by label; the first rows are theirs."""
        for row, label in enumerate(PHASE_LABELS):
            if any(self._buckets[row * _WIDTH : (row + 1) * _WIDTH]):
                yield label, self.of(row)


class RunCounts:
    """Counters, histograms and last values of one run folder, from its records in the order of their index."""

    __slots__ = (
        "_first",
        "_lanes",
        "_last",
        "_parts",
        "_recent",
        "_seconds",
        "behind",
        "complete",
        "count",
        "environment_failures",
        "last",
        "lost_seconds",
        "lost_steps",
        "memory",
        "parts_left_out",
        "response_length",
        "reward_parts",
        "step",
        "sync_bytes",
        "unverified",
        "useful_seconds",
    )

    def __init__(self) -> None:
        self.count = 0
        """Records read: the index of the next one. That of step 0 is among them, and counts nowhere else."""
        self.behind = 0
        """Records that the driver had at the last feed and that were not counted."""
        self.complete = False
        """Whether all records that the driver had were counted at some time."""
        self.last: StepView | None = None
        self.step = 0
        """Last completed step."""
        self.sync_bytes = math.nan
        self.response_length = math.nan
        self.memory: Mapping[str, float] = {}
        """Bytes by rendered labels, of the newest record."""
        self.reward_parts: Mapping[str, float] = {}
        """Means of the newest record by rendered labels; NaN for parts of earlier records."""
        self.parts_left_out = 0.0
        self.environment_failures: Counter[str] = Counter()
        """By class; those of a job without episodes are not there."""
        self.unverified = 0
        self.useful_seconds = 0.0
        self.lost_seconds = 0.0
        self.lost_steps = 0
        self._first: Fingerprint | None = None
        self._last: Fingerprint | None = None
        self._parts = PartNames()
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._seconds = _Histograms(_STEP_ROW + 1)
        self._lanes: dict[str, _Histograms] = {}

    def contradicts(self, records: Iterable[StepRecord]) -> bool:
        """Whether a record that was counted before, the first or the last, is another one here."""
        known = {0: self._first, self.count - 1: self._last} if self.count else {}
        return any(known[record.index] != fingerprint(record) for record in records if record.index in known)

    def next_of(self, records: Iterable[StepRecord]) -> list[StepRecord]:
        """Select the records that come next without a gap, from records in order."""
        found: list[StepRecord] = []
        for record in records:
            if record.index == self.count + len(found):
                found.append(record)
        return found

    def add(self, record: StepRecord) -> None:
        """Count a record; its index must be `count`."""
        assert record.index == self.count
        if record.is_step:
            self._count_step(record)
        self._last = fingerprint(record)
        if self._first is None:
            self._first = self._last
        self.count += 1

    def _count_step(self, record: StepRecord) -> None:
        self._seconds.observe_phases(trainers_by_label(record))
        for lane, phases in lanes_by_label(record).items():
            if lane not in self._lanes:
                self._lanes[lane] = _Histograms(_STEP_ROW)
            self._lanes[lane].observe_phases(phases)
        seconds = record.step_seconds
        self._seconds.observe(_STEP_ROW, seconds)
        self._recent.append(seconds)
        if record.rerun:
            self.lost_seconds += seconds
            self.lost_steps += 1
        else:
            self.useful_seconds += seconds
        if record.applied:
            self.step = record.step
        self._parts.admit(record.reward_parts())
        self.environment_failures.update(record.environment_failures())
        self.unverified += record.weights is not None and not record.weights.verified

    def show(self, newest: StepRecord, memory: Mapping[str, float]) -> None:
        """Keep what is shown of the newest counted step, with its memory by rendered labels."""
        size = None if newest.weights is None else newest.weights.bytes
        self.sync_bytes = math.nan if size is None else float(size)
        self.response_length = math.nan if newest.response_length is None else float(newest.response_length)
        self.last = view_of(newest)
        self._show_parts(newest)
        self.memory = memory

    def _show_parts(self, newest: StepRecord) -> None:
        # The driver keeps the same bounds; but the records come from whatever image the job runs.
        values, names = newest.reward_parts(), list(self._parts)
        shown = {name: values.get(name) for name in names}
        self.reward_parts = {labels(part=n): math.nan if v is None else float(v) for n, v in shown.items()}
        self.parts_left_out = newest.reward_parts_left_out + len(values.keys() - shown.keys())

    def steps(self) -> Histogram:
        """Step seconds."""
        return self._seconds.of(_STEP_ROW)

    def phases(self) -> Iterator[tuple[str, Histogram]]:
        """Phase seconds of the trainers' phases that ever ran, by label."""
        return self._seconds.phases()

    def lanes(self) -> Iterator[tuple[str, str, Histogram]]:
        """The same of what runs beside them, by lane and label."""
        for lane, histograms in self._lanes.items():
            yield from ((lane, label, histogram) for label, histogram in histograms.phases())

    def totals(self) -> DriverTotals:
        """For the driver's view."""
        return DriverTotals(
            last=self.last,
            median_step_seconds=statistics.median(self._recent) if self._recent else None,
            useful_seconds=self.useful_seconds,
            lost_seconds=self.lost_seconds,
            lost_steps=self.lost_steps,
        )
