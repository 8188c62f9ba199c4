"""Step feed -> job metrics, each executed step exactly once -> exposition."""

from rljob_operator.metrics.counts import DriverTotals
from rljob_operator.metrics.record import RecordError
from rljob_operator.metrics.store import JobKey, JobMetricsStore
from rljob_operator.metrics.text import CONTENT_TYPE

__all__ = ["CONTENT_TYPE", "DriverTotals", "JobKey", "JobMetricsStore", "RecordError"]
