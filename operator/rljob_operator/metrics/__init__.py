"""Step feed -> job metrics, each executed step exactly once -> exposition."""

from rljob_operator.metrics.counts import DriverTotals
from rljob_operator.metrics.exposition import CONTENT_TYPE
from rljob_operator.metrics.store import JobKey, JobMetricsStore

__all__ = ["CONTENT_TYPE", "DriverTotals", "JobKey", "JobMetricsStore"]
