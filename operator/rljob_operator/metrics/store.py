"""The metrics of all jobs: fed by the shell with step records and statuses, read by Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest

from rljob_api.json_types import Json
from rljob_operator.metrics.counts import DriverTotals, RunCounts
from rljob_operator.metrics.exposition import header, labels
from rljob_operator.metrics.families import FAMILIES, JobMetrics
from rljob_operator.metrics.lifecycle import Lifecycle
from rljob_operator.metrics.memory import bounded
from rljob_operator.metrics.record import by_index
from rljob_operator.state.observed import JobView

JobKey = tuple[str, str, str]
"""(namespace, name, uid)."""

_JOBS_PER_PART = 100


class JobMetricsStore:
    """Counts every executed step of every job once, and says it in Prometheus' text format.

    What it says of a job follows from the records of its run folder and from its status alone: a new store that reads
    both again says the same. Not thread-safe: all calls from one event loop.

    Args:
        registry: the operator's own metrics, which the exposition ends with.
        clock: Unix seconds.
    """

    def __init__(self, registry: CollectorRegistry | None = None, clock: Callable[[], float] = time.time) -> None:
        self._registry = registry
        self._clock = clock
        self._jobs: dict[tuple[str, str], JobMetrics] = {}

    def feed(self, key: JobKey, records: Iterable[Json], total: int | None = None) -> int:
        """Count the records that were not counted yet; returns their number.

        Records may come again, in any order and in overlapping pages. One whose predecessor was not seen yet waits to
        be read again. Where the first or the last counted record comes with other content, or the driver has fewer
        than were counted, the run folder was replaced: its counting starts anew, as a counter does that Prometheus
        sees begin at 0.

        Args:
            key: the job; records of one that was replaced under its name are left out.
            records: as `/v1/steps` gives them.
            total: `total` of the same answer. Until that many were counted for the first time, the job's record
                metrics are not shown, so that a rebuild after a restart cannot be seen half done. None: these are all.

        Raises:
            WireError: a record is not what the driver promises; nothing of `records` was counted.
        """
        job = self._held(key)
        if job is None:
            return 0
        parsed = by_index(records)
        replaced = job.counts.contradicts(parsed) or (total is not None and total < job.counts.count)
        counts = RunCounts() if replaced else job.counts
        fresh = counts.next_of(parsed)
        newest = next((record for record in reversed(fresh) if record.is_step), None)
        memory = {} if newest is None else bounded(newest.memory_states())
        for record in fresh:
            counts.add(record)
        if newest is not None:
            counts.show(newest, memory)
        counts.behind = max(0, (counts.count if total is None else total) - counts.count)
        counts.complete = counts.complete or not counts.behind
        job.counts = counts
        return len(fresh)

    def next_index(self, key: JobKey) -> int:
        """Value of `/v1/steps?after=`: the last counted record comes again, to be compared."""
        job = self._jobs.get(key[:2])
        return max(-1, job.counts.count - 2) if job is not None and job.uid == key[2] else -1

    def behind(self, key: JobKey) -> int:
        """Records that the driver had at the last feed and that are to be asked for yet."""
        job = self._jobs.get(key[:2])
        return job.counts.behind if job is not None and job.uid == key[2] else 0

    def driver_totals(self, key: JobKey) -> DriverTotals:
        """Sums over the job's records; zeros for a job without records."""
        job = self._jobs.get(key[:2])
        return job.counts.totals() if job is not None and job.uid == key[2] else DriverTotals()

    def observe_status(self, job: JobView) -> None:
        """Take over what the job's status says; a job made anew under the same name replaces the old one."""
        place = (job.namespace, job.name)
        held = self._jobs.get(place)
        if held is None or (held.uid != job.uid and (held.status is None or held.status.created <= job.created)):
            held = self._jobs[place] = _new_job((*place, job.uid))
        if held.uid != job.uid:
            return
        if held.status is None:
            held.status = Lifecycle(job.created)
        held.status.observe(job)

    def forget(self, key: JobKey) -> None:
        """Drop all series of a job that is gone."""
        job = self._jobs.get(key[:2])
        if job is not None and job.uid == key[2]:
            del self._jobs[key[:2]]

    def clear(self) -> None:
        """Drop all jobs: another replica leads now and shows them."""
        self._jobs.clear()

    def parts(self) -> Iterator[bytes]:
        """All metrics (content type `CONTENT_TYPE`), in pieces of some megabytes at most.

        Jobs may be fed, observed and forgotten between two pieces.
        """
        jobs, now = list(self._jobs.values()), self._clock()
        for metric, lines in FAMILIES:
            yield header(metric).encode()
            for start in range(0, len(jobs), _JOBS_PER_PART):
                part = "".join([line for job in jobs[start : start + _JOBS_PER_PART] for line in lines(job, now)])
                if part:
                    yield part.encode()
        if self._registry is not None:
            yield generate_latest(_WithoutCreated(self._registry))

    def _held(self, key: JobKey) -> JobMetrics | None:
        job = self._jobs.get(key[:2])
        if job is None:
            job = self._jobs[key[:2]] = _new_job(key)
        return job if job.uid == key[2] else None


class _WithoutCreated:
    """A registry without prometheus_client's `_created` series: nobody reads them, and each label set has one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


def _new_job(key: JobKey) -> JobMetrics:
    namespace, name, uid = key
    return JobMetrics(uid, labels(namespace=namespace, rljob=name))
