"""Actions that `reconcile` plans. The shell carries it out in order; every action may be repeated without harm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rljob_api.status import RLJobStatus
from rljob_operator.state.observed import EngineGroupView


@dataclass(frozen=True, slots=True)
class ApplySecret:
    """Make the Secret with the driver's bearer token, unless it is there. The shell draws the token."""


@dataclass(frozen=True, slots=True)
class ApplyPolicy:
    """Make the head's NetworkPolicy, or bring it up to date; never one of somebody else."""


@dataclass(frozen=True, slots=True)
class CreateCluster:
    """Make the RayCluster, as `render` makes it of the job; one of that name that is there already stays as it is."""


@dataclass(frozen=True, slots=True)
class DeleteCluster:
    """Delete the RayCluster with this UID (a precondition: never another one of that name)."""

    uid: str
    wait: bool = True
    """It stays until its pods are gone; False: it goes at once, and pods that cannot be reached are not tracked."""


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the RLJob itself (its TTL is over), with its UID as precondition."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit the driver to the head; harmless when the id is known there."""

    id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask Ray to stop a submission: SIGTERM, the driver saves the last completed step and ends with exit code 75."""

    id: str


@dataclass(frozen=True, slots=True)
class RequestCheckpoint:
    """POST /v1/checkpoint to the driver; `annotation` is the value of the annotation that asked for it."""

    annotation: str


@dataclass(frozen=True, slots=True)
class WantEngineNodes:
    """POST /v1/engine-nodes to the driver: so many nodes with engines."""

    nodes: int


@dataclass(frozen=True, slots=True)
class ScaleEngines:
    """Give the RayCluster's group of engines another number of pods; nothing happens where it is not as it was seen."""

    uid: str
    """UID of the RayCluster."""
    seen: EngineGroupView
    replicas: int
    pods: tuple[str, ...] = ()
    """Names of those that go."""


@dataclass(frozen=True, slots=True)
class AnnotateWorkload:
    """Write to Kueue's Workload how much a preemption would cost now; never to another one of that name."""

    name: str
    uid: str
    boost: int
    last_checkpoint: str
    """RFC 3339; empty: nothing is saved."""


@dataclass(frozen=True, slots=True)
class ClaimSandboxes:
    """Make SandboxClaims with these names; one of somebody else is in the way."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReleaseSandboxes:
    """Delete SandboxClaims, each with its UID as precondition."""

    claims: tuple[tuple[str, str], ...]
    """Name and UID of each."""


Action = (
    ApplySecret
    | ApplyPolicy
    | CreateCluster
    | DeleteCluster
    | DeleteJob
    | Submit
    | Stop
    | RequestCheckpoint
    | WantEngineNodes
    | ScaleEngines
    | AnnotateWorkload
    | ClaimSandboxes
    | ReleaseSandboxes
)


OBJECTS = (ApplySecret, ApplyPolicy, CreateCluster, ClaimSandboxes)
"""Actions without whose objects a job cannot begin."""


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes Event on the job."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Actions first, then the status, then the events; after a failed action the rest is left for the next time."""

    status: RLJobStatus
    """The whole status as it should be; the shell writes it only where it differs and throttles progress alone."""
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None
    """Seconds until the job should be looked at again without any event; None: when something happens."""
    status_first: bool = False
    """The status must be stored before the actions run (a new attempt's number before its submission)."""
    urgent: bool = field(default=True)
    """False when the status differs in progress only: then it may wait for the throttle (one write in 10 s)."""
