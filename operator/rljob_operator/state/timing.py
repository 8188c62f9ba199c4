"""Durations of the operator's waits, and times in the format of the status."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from rljob_api.spec import RLJobSpec
from rljob_api.status import AttemptStatus

RUNNING_LOOK_SECONDS = 5.0
"""Interval at which a job with a driver is observed."""
STARTING_LOOK_SECONDS = 2.0
"""Interval while the cluster is ready and the driver is not: this adds to the time to Running."""
WAITING_LOOK_SECONDS = 60.0
"""Interval where a watch reports every relevant change; only in case an event was lost."""
LOST_POD_SECONDS = 60.0
"""Time for the driver to notice by itself that one of its pods is gone."""
LATE_POD_SECONDS = 300.0
"""Time after its grace period in which a pod that is still there may be the kubelet's delay; later it is
unknown whether its processes run."""
NOTICE_SECONDS = 300.0
"""Time in which a cause that went away still explains a failure of the driver."""
SILENCE_SECONDS = 30.0
"""Silence of the driver's endpoint after which the Running condition reports it."""
STOP_MARGIN_SECONDS = 30.0
"""On top of `checkpoint.graceSeconds`, for Ray and the operator."""
DEADLINE_MARGIN_SECONDS = 60.0
"""The driver's own deadlines come first: it writes the stacks and names the phase."""
LINGER_SECONDS = 300.0
"""Time that a driver in a cluster waits at its end for its last record to be read, unless `spec.records` says
otherwise: the pods are held until the operator is back in any case, so that so long an absence costs no record of a
step."""
FRESHNESS_SECONDS = 60.0
"""Greatest age of `progress.lastUpdateTime` while nothing else of the progress changes."""


def time_text(seconds: float) -> str:
    """Unix seconds as `2026-01-31T12:00:00Z`, in whole seconds as Kubernetes writes times."""
    return datetime.fromtimestamp(math.floor(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(text: str) -> float:
    """The reverse of `time_text`; takes any RFC 3339 time."""
    return datetime.fromisoformat(text).timestamp()


def seconds_since(text: str | None, now: float) -> float:
    """Seconds since a time of the status; 0 when there is none, or when the clock went back."""
    return 0.0 if text is None else max(0.0, now - seconds_of(text))


def duration_text(seconds: float) -> str:
    """Return `45s`, `12m`, `3h12m` or `5d3h`."""
    minutes = int(seconds // 60)
    if minutes < 1:
        return f"{int(seconds)}s"
    if minutes < 60:
        return f"{minutes}m"
    hours = minutes // 60
    return f"{hours}h{minutes % 60:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24}h"


def longest_phase_seconds(spec: RLJobSpec) -> float:
    """The longest that any phase of a step may take."""
    return max([spec.timeouts.phase_seconds, *spec.timeouts.phases.values()])


def stop_deadline(spec: RLJobSpec, attempt: AttemptStatus) -> float:
    """When a driver that was asked to stop is given up."""
    assert attempt.stop_time is not None, "it was asked to stop"
    return seconds_of(attempt.stop_time) + spec.checkpoint.grace_seconds + STOP_MARGIN_SECONDS
