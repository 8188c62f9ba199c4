"""The one error of a weight sync."""

from __future__ import annotations

from rljob_worker.errors import JobError


class WeightSyncError(JobError):
    """A weight sync failed; engines that took part are unusable until a later sync succeeds."""
