"""The driver's `/metrics`: step records as Prometheus metrics."""

from __future__ import annotations

import math
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rljob_api import metrics as m
from rljob_api.reward_parts import PartNames
from rljob_api.wire.step_record import StepRecord
from rljob_worker.records.event_names import CHECKPOINT_SET_ASIDE

Collector = Counter | Gauge | Histogram


def build(metric: m.Metric, registry: CollectorRegistry) -> Collector:
    """The collector of one metric family, registered."""
    if metric.kind is m.Kind.HISTOGRAM:
        return Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)
    kind = Counter if metric.kind is m.Kind.COUNTER else Gauge
    return kind(metric.name, metric.help, metric.labels, registry=registry)


class JobMetrics:
    """Keeps the metrics of one job; a sink of step records.

    Fed with a run's old records first, it holds after a restart what it held before.
    """

    def __init__(self, target_steps: int) -> None:
        self._registry = CollectorRegistry()
        self._by_name: dict[str, Any] = {
            metric.name: build(metric, self._registry) for metric in (*m.JOB_METRICS, *m.DRIVER_METRICS)
        }
        self._parts = PartNames()
        self._get(m.TARGET_STEPS).set(target_steps)

    def _get(self, metric: m.Metric) -> Any:
        return self._by_name[metric.name]

    def __call__(self, record: StepRecord) -> None:
        """Count one executed step."""
        if not record.is_step:
            return
        for phase, seconds in {**record.phases, "other": record.other}.items():
            self._get(m.PHASE_SECONDS).labels(phase=phase).observe(seconds)
        for lane, phases in record.lanes.items():
            for phase, seconds in {**phases, "other": record.lane_other(lane)}.items():
                self._get(m.LANE_PHASE_SECONDS).labels(lane=lane, phase=phase).observe(seconds)
        self._get(m.STEP_SECONDS).observe(record.step_seconds)
        self._get(m.STEP).set(record.step)
        if record.rerun:
            self._get(m.LOST_STEPS).inc()
        for metric, value in (
            (m.REWARD_MEAN, record.reward),
            (m.RESPONSE_LENGTH, record.response_length),
            (m.LOGPROB_ABS_DIFF, record.log_prob_abs_diff),
            (m.SYNC_BYTES, None if record.weights is None else record.weights.bytes),
        ):
            # Without a value the last step's would pass for this one's.
            self._get(metric).set(math.nan if value is None else value)
        self._reward_parts(record)
        for kind, count in record.environment_failures().items():
            # Also the zeros: Prometheus sees no increase in a series that begins at 1.
            self._get(m.ENVIRONMENT_FAILURES).labels(**{"class": kind}).inc(count)
        for (process, rank, state), value in record.memory_states().items():
            self._get(m.MEMORY_BYTES).labels(process=process, rank=rank, state=state).set(value)

    def _reward_parts(self, record: StepRecord) -> None:
        parts = record.reward_parts()
        left_out = self._parts.admit(parts)
        for name in self._parts:
            value = parts.get(name)
            self._get(m.REWARD_PART).labels(part=name).set(math.nan if value is None else value)
        self._get(m.REWARD_PARTS_LEFT_OUT).set(record.reward_parts_left_out + len(left_out))

    def event(self, name: str) -> None:
        """Count one of the driver's events."""
        if name == CHECKPOINT_SET_ASIDE:
            self._get(m.CHECKPOINT_FALLBACKS).inc()

    def write_failed(self, what: str) -> None:
        """Count a write that the driver went on without."""
        self._get(m.WRITE_FAILURES).labels(what=what).inc()

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)
