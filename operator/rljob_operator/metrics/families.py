"""The lines of each metric family for one job."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache

from rljob_api import metrics as m
from rljob_operator.metrics.counts import RunCounts
from rljob_operator.metrics.exposition import HistogramTemplate, labels, number
from rljob_operator.metrics.lifecycle import Lifecycle
from rljob_operator.metrics.record import LANE_LABELS, PHASE_LABELS


class JobMetrics:
    """Metrics of one job.

    Args:
        uid: its UID.
        job_labels: the labels `namespace` and `rljob`, rendered.
    """

    __slots__ = ("counts", "job_labels", "status", "uid")

    def __init__(self, uid: str, job_labels: str) -> None:
        self.uid = uid
        self.job_labels = job_labels
        self.counts = RunCounts()
        self.status: Lifecycle | None = None

    @property
    def records(self) -> RunCounts | None:
        """Sums over the records, once all that there are were counted and one of them is of a step."""
        return self.counts if self.counts.complete and self.counts.last is not None else None


Lines = Callable[[JobMetrics, float], Iterator[str]]

_PHASE_TEMPLATES = {label: HistogramTemplate(m.PHASE_SECONDS, labels(phase=label)) for label in PHASE_LABELS}
_LANE_TEMPLATES = {
    (lane, label): HistogramTemplate(m.LANE_PHASE_SECONDS, labels(lane=lane, phase=label))
    for lane in LANE_LABELS
    for label in PHASE_LABELS
}
_STEP_TEMPLATE = HistogramTemplate(m.STEP_SECONDS)


def _phase_seconds(job: JobMetrics, now: float) -> Iterator[str]:
    if job.records is not None:
        for label, histogram in job.records.phases():
            yield _PHASE_TEMPLATES[label].render(job.job_labels, histogram.cumulative, histogram.sum)


def _lane_phase_seconds(job: JobMetrics, now: float) -> Iterator[str]:
    if job.records is not None:
        for lane, label, histogram in job.records.lanes():
            yield _LANE_TEMPLATES[lane, label].render(job.job_labels, histogram.cumulative, histogram.sum)


def _step_seconds(job: JobMetrics, now: float) -> Iterator[str]:
    if job.records is not None:
        histogram = job.records.steps()
        yield _STEP_TEMPLATE.render(job.job_labels, histogram.cumulative, histogram.sum)


def _memory(job: JobMetrics, now: float) -> Iterator[str]:
    if job.records is not None:
        for own_labels, value in job.records.memory.items():
            yield _line(m.MEMORY_BYTES, job, value, own_labels)


def _reward_parts(job: JobMetrics, now: float) -> Iterator[str]:
    if job.records is not None:
        for own_labels, value in job.records.reward_parts.items():
            yield _line(m.REWARD_PART, job, value, own_labels)


def _environment_failures(job: JobMetrics, now: float) -> Iterator[str]:
    for kind, count in job.records.environment_failures.items() if job.records is not None else ():
        yield _line(m.ENVIRONMENT_FAILURES, job, count, _label(**{"class": kind}))


def _status_phase(job: JobMetrics, now: float) -> Iterator[str]:
    if job.status is not None and job.status.phase is not None:
        yield _line(m.STATUS_PHASE, job, 1, _label(phase=job.status.phase.value))


def _condition(job: JobMetrics, now: float) -> Iterator[str]:
    for kind, status in job.status.conditions if job.status is not None else ():
        yield _line(m.CONDITION, job, 1, _label(type=kind, status=status))


def _restarts(job: JobMetrics, now: float) -> Iterator[str]:
    # Also the zeros: Prometheus sees no increase in a series that begins at 1.
    for reason, count in job.status.restarts.items() if job.status is not None else ():
        yield _line(m.RESTARTS, job, count, _label(reason=reason))


def _verification_failures(job: JobMetrics, now: float) -> Iterator[str]:
    if job.status is not None:
        yield _line(m.VERIFICATION_FAILURES, job, job.status.failed_syncs, _label(source="attempt"))
    if job.records is not None:
        yield _line(m.VERIFICATION_FAILURES, job, job.records.unverified, _label(source="record"))


def _engine_nodes(job: JobMetrics, now: float) -> Iterator[str]:
    for state, nodes in job.status.engine_nodes.items() if job.status is not None else ():
        yield _line(m.ENGINE_NODES, job, nodes, _label(state=state))


def _goodput(job: JobMetrics, now: float) -> Iterator[str]:
    if job.status is None:
        return
    useful, lost = (None, 0.0) if job.records is None else (job.records.useful_seconds, job.records.lost_seconds)
    for state, value in job.status.device_seconds(useful, lost, now).items():
        yield _line(m.GOODPUT, job, value, _label(state=state))


def _single(metric: m.Metric, value: Callable[[JobMetrics], float | None]) -> tuple[m.Metric, Lines]:
    """A family of one series a job; none where the value is None."""

    def lines(job: JobMetrics, now: float) -> Iterator[str]:
        known = value(job)
        if known is not None:
            yield _line(metric, job, known)

    return metric, lines


_label = lru_cache(maxsize=1024)(labels)
"""For label values that are few."""


def _line(metric: m.Metric, job: JobMetrics, value: float, own_labels: str = "") -> str:
    separator = "," if own_labels else ""
    return f"{metric.exposed_name}{{{job.job_labels}{separator}{own_labels}}} {number(value)}\n"


def _step(job: JobMetrics) -> float | None:
    if job.records is not None:
        return job.records.step
    return None if job.status is None else job.status.step


def _reward(job: JobMetrics) -> float | None:
    if job.records is not None and job.records.last is not None:
        # Without a value the last step's would pass for this one's.
        return math.nan if job.records.last.reward is None else job.records.last.reward
    return None if job.status is None else job.status.reward


def _logprob_abs_diff(job: JobMetrics) -> float | None:
    if job.records is not None and job.records.last is not None:
        value = job.records.last.log_prob_abs_diff
        return math.nan if value is None else value
    return None if job.status is None else job.status.log_prob_abs_diff


def _last_progress(job: JobMetrics) -> float | None:
    last = job.records.last.time if job.records is not None and job.records.last is not None else None
    status = job.status
    times = [last] if status is None else [status.last_step_time if last is None else last, status.running_since]
    return max((time for time in times if time is not None), default=None)


FAMILIES: tuple[tuple[m.Metric, Lines], ...] = (
    (m.PHASE_SECONDS, _phase_seconds),
    (m.LANE_PHASE_SECONDS, _lane_phase_seconds),
    (m.STEP_SECONDS, _step_seconds),
    _single(m.STEP, _step),
    _single(m.TARGET_STEPS, lambda job: None if job.status is None else job.status.target_steps),
    _single(m.REWARD_MEAN, _reward),
    (m.REWARD_PART, _reward_parts),
    _single(m.REWARD_PARTS_LEFT_OUT, lambda job: None if job.records is None else job.records.parts_left_out),
    _single(m.RESPONSE_LENGTH, lambda job: None if job.records is None else job.records.response_length),
    _single(m.SYNC_BYTES, lambda job: None if job.records is None else job.records.sync_bytes),
    _single(m.LOGPROB_ABS_DIFF, _logprob_abs_diff),
    (m.MEMORY_BYTES, _memory),
    (m.ENVIRONMENT_FAILURES, _environment_failures),
    _single(m.LOST_STEPS, lambda job: None if job.records is None else job.records.lost_steps),
    (m.STATUS_PHASE, _status_phase),
    (m.CONDITION, _condition),
    (m.RESTARTS, _restarts),
    (m.VERIFICATION_FAILURES, _verification_failures),
    _single(m.DEVICES, lambda job: None if job.status is None else job.status.devices),
    (m.ENGINE_NODES, _engine_nodes),
    (m.GOODPUT, _goodput),
    _single(m.LAST_PROGRESS, _last_progress),
)
"""In the order of the exposition; each with a function that gives a job's lines at a time."""
