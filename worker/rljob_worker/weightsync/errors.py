"""The one error of a weight sync."""

from __future__ import annotations

from rljob_worker.errors import EXIT_WEIGHT_SYNC, JobError


class WeightSyncError(JobError):
    """A weight sync failed; engines that took part are unusable until a later sync succeeds."""

    exit_code = EXIT_WEIGHT_SYNC
