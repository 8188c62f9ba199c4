"""The operator's own metrics; those of the jobs are in `rljob_operator.metrics`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rljob_api import metrics
from rljob_api.metrics import Metric


class OperatorMetrics:
    """Metrics of the operator itself; names, texts and labels are in `rljob_api.metrics`.

    Args:
        registry: where the metrics are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(metric: Metric) -> Counter:
            return Counter(metric.name, metric.help, metric.labels, registry=registry)

        def gauge(metric: Metric) -> Gauge:
            return Gauge(metric.name, metric.help, metric.labels, registry=registry)

        def histogram(metric: Metric) -> Histogram:
            return Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)

        self.registry = registry
        self.reconcile_seconds = histogram(metrics.RECONCILE_SECONDS)
        self.queue_depth = gauge(metrics.QUEUE_DEPTH)
        self.requests = counter(metrics.API_REQUESTS)
        self.writes = counter(metrics.WRITES)
        self.watch_age = gauge(metrics.WATCH_AGE)
        self.watch_restarts = counter(metrics.WATCH_RESTARTS)
        self.cached = gauge(metrics.CACHED_OBJECTS)
        self.events_dropped = counter(metrics.EVENTS_DROPPED)
        for cause in ("rate", "queue", "error"):
            self.events_dropped.labels(cause)
        self.record_errors = counter(metrics.RECORD_ERRORS)
        for cause in ("answer", "content", "time"):
            self.record_errors.labels(cause)
        self.leader = gauge(metrics.LEADER)
