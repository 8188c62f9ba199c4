"""One job at one instant, as it was observed. Made by the shell, read by `reconcile`; nothing does I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rljob_api.spec import RLJobSpec
from rljob_api.status import RLJobStatus
from rljob_api.wire.driver_status import EngineNodes
from rljob_operator.state.causes import Cause


@dataclass(frozen=True, slots=True)
class JobView:
    """The RLJob itself."""

    namespace: str
    name: str
    uid: str
    generation: int
    created: float
    """Unix seconds, as all times here."""
    spec: RLJobSpec | None
    """None when the spec does not pass validation."""
    problem: str = ""
    """Problem of the spec; names the field. A valid spec has one where it cannot be rendered (any more)."""
    status: RLJobStatus = field(default_factory=RLJobStatus)
    deleting: bool = False
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    """At most 64 of them."""
    remark: str = ""
    """A sentence about something that was asked for and has no effect."""


class PodRole(StrEnum):
    """Pods of a Ray cluster."""

    HEAD = "head"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod of the job's Ray cluster."""

    name: str
    uid: str
    role: PodRole
    phase: str
    """Pending, Running, Succeeded, Failed or Unknown."""
    ready: bool
    deleting: bool = False
    deleted: float | None = None
    """When its grace period ends, where it is being deleted."""
    cluster_uid: str = ""
    """UID of the RayCluster that controls it."""
    group: str = ""
    """Worker group that it is of."""
    address: str | None = None
    """Its IP address, once it has one."""
    node: str | None = None
    scheduled: float | None = None
    """When it got its node."""
    node_lost: bool = False
    """The node is not ready or gone, as far as the pod's conditions say."""
    waiting_reason: str = ""
    """Reason of the first container that waits: ImagePullBackOff, CrashLoopBackOff, ..."""
    waiting_message: str = ""
    terminated_reason: str = ""
    """Reason of the first container that ended: OOMKilled, Error, ...; or the pod's own reason: Evicted, NodeLost."""
    terminated_message: str = ""
    exit_code: int | None = None
    ended_container: str = ""
    """Name of that first container that ended."""
    unschedulable: str = ""
    """The scheduler's message while it finds no node."""
    gated: bool = False
    """A scheduling gate holds it (Kueue)."""
    warning: str = ""
    """Newest Warning event about it, as `Reason: message`; empty where events were not read (the operator does not)."""


@dataclass(frozen=True, slots=True)
class GonePod:
    """A worker pod that was deleted a moment ago, as it was before that."""

    pod: PodView
    time: float
    """When it was deleted."""


@dataclass(frozen=True, slots=True)
class EngineGroupView:
    """The worker group of the nodes with engines, as the RayCluster's spec has it."""

    index: int
    """Position among the worker groups."""
    replicas: int


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The job's RayCluster."""

    name: str
    uid: str
    ready: bool
    """Head and all workers are ready, as KubeRay's status says for the present generation."""
    suspended: bool = False
    """Somebody else (the queue) wants it to hold no pods, or it holds none for that reason. The operator itself never
    suspends a RayCluster: it deletes it."""
    deleting: bool = False
    owned: bool = True
    """Its controller is this job (by UID)."""
    head_pod: str | None = None
    head_service: str | None = None
    desired_workers: int = 0
    ready_workers: int = 0
    engine_group: EngineGroupView | None = None
    """None: engines have no nodes of their own."""
    failure: str = ""
    """KubeRay's message of a ReplicaFailure condition."""
    created: float = 0.0
    owner: str = ""
    """Kind and name of the controller where that is not this job, like `RayJob other`; empty: nobody's."""
    answered: bool = True
    """KubeRay has written a status for it."""
    warning: str = ""
    """Newest Warning event about it, as `Reason: message`; empty where events were not read."""


@dataclass(frozen=True, slots=True)
class WorkloadView:
    """Kueue's Workload, as far as `state/preemption.py` writes to it."""

    name: str
    uid: str
    boost: str = ""
    """Its annotation `kueue.x-k8s.io/priority-boost`."""
    last_checkpoint: str = ""
    """Its annotation `rljob.dev/last-checkpoint`."""


@dataclass(frozen=True, slots=True)
class QueueView:
    """State in the queueing system: Kueue's Workload or Volcano's PodGroup."""

    admitted: bool
    reason: str = ""
    """Name of the state in the queueing system: Pending, Inadmissible, NotEnoughResources, NodePredicateFailed, ..."""
    message: str = ""
    object: str = ""
    """Kind and name, like `Workload raycluster-a-1b2c3` or `PodGroup ray-a-pg`."""
    workload: WorkloadView | None = None
    """Fields that only Kueue has."""


@dataclass(frozen=True, slots=True)
class SandboxView:
    """One SandboxClaim with the job's label."""

    name: str
    uid: str
    owned: bool
    """Its controller is this job (by UID)."""
    address: str = ""
    """IP address of its sandbox's pod; empty while there is none."""
    ready: bool = False
    ended: bool = False
    """Its sandbox has ended and will not come back."""
    deleting: bool = False
    reason: str = ""
    """Reason of the condition that says why it is not ready."""
    message: str = ""


@dataclass(frozen=True, slots=True)
class SandboxesView:
    """SandboxClaims of a job that asks for a warm pool."""

    claims: tuple[SandboxView, ...] = ()
    problem: str = ""
    """Why they could not be read."""
    passing: bool = False
    """The problem may be over at the next look: it is no missing kind or right."""
    unseen: bool = False
    """The user may not list them, which says nothing about them."""


class SubmissionState(StrEnum):
    """States of a Ray job."""

    MISSING = "MISSING"
    """The head answers and does not know it."""
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def runs(self) -> bool:
        """Whether the driver runs or is about to."""
        return self in (SubmissionState.PENDING, SubmissionState.RUNNING)

    @property
    def ended(self) -> bool:
        """Whether the driver has run and does no more."""
        return not self.runs and self is not SubmissionState.MISSING


@dataclass(frozen=True, slots=True)
class SubmissionView:
    """The Ray job of attempt `status.attempt`."""

    id: str
    state: SubmissionState
    message: str = ""
    exit_code: int | None = None
    """Exit code of the driver; negative: a signal."""
    start_time: float | None = None
    end_time: float | None = None
    last_log_lines: tuple[str, ...] = ()
    """At most 50; only asked for once the job has ended."""
    log_file: str = ""
    """Query of Ray's log API that names the driver's log file; empty: it has not run on a node."""
    session: str = ""
    """`session_name` of the head's /api/version: every start of a head has another one. Asked for unless the state is
    PENDING or RUNNING; empty: not asked."""


@dataclass(frozen=True, slots=True)
class StepView:
    """The last step's record as far as the status shows it."""

    step: int
    seconds: float
    phases: Mapping[str, float]
    switch_seconds: float
    reward: float | None
    log_prob_abs_diff: float | None
    time: float
    weight_version: int | None = None
    stopped_early: str = ""
    """Why the run ends with it."""


@dataclass(frozen=True, slots=True)
class DriverView:
    """Answers of the driver's endpoint, and sums over the records that were read so far."""

    ready: bool
    step: int
    """Completed steps."""
    attempt: int
    """The driver's own count of its run folder; not the operator's attempt number."""
    phase: str | None = None
    """Phase that runs now."""
    phase_seconds: float | None = None
    """Seconds that it has run, or since the last one ended; None: the driver does not say."""
    lanes: Mapping[str, str] = field(default_factory=dict)
    """Phase that runs now in each lane beside the trainers'; the operator does not keep it."""
    groups: Mapping[str, int] = field(default_factory=dict)
    """Groups that are open now, by what they wait for; the operator does not keep it."""
    engine_nodes: EngineNodes | None = None
    """Nodes with engines, where their number may change."""
    stopping: bool = False
    last_checkpoint_step: int | None = None
    checkpoint_warnings: Mapping[str, str] = field(default_factory=dict)
    """Problems of the checkpoint from which it continued, and of newer ones."""
    unwritten: Mapping[str, str] = field(default_factory=dict)
    """Files that it could not write and continued without, each with its last error (empty: unknown)."""
    last: StepView | None = None
    median_step_seconds: float | None = None
    """Over the recent steps."""
    useful_seconds: float = 0.0
    """Sum over the records' steps that count; over all attempts."""
    lost_seconds: float = 0.0
    """Sum over steps that were run again."""
    lost_steps: int = 0
    records_error: str = ""
    """Why not all records could be read."""


@dataclass(frozen=True, slots=True)
class Observed:
    """All of it. None means: not there (or, for the last two, not asked or no answer; see the error texts)."""

    job: JobView
    cluster: ClusterView | None = None
    pods: tuple[PodView, ...] = ()
    gone_pods: tuple[GonePod, ...] = ()
    queue: QueueView | None = None
    boosts_priority: bool = False
    """The administrator lets the operator tell Kueue what a preemption would cost."""
    sandboxes: SandboxesView = SandboxesView()
    secret_exists: bool = False
    refused: Cause | None = None
    """Why the API server did not take an object that the job needs, when it was tried last."""
    names_taken: str = ""
    """Why the names of the objects that the job would get are not free, as a sentence: an older job needs them."""
    policy_current: bool = False
    """The head's NetworkPolicy is there as it is rendered now, or none is wanted and none is there."""
    submission: SubmissionView | None = None
    submission_error: str = ""
    """Why the head's job API did not answer; empty when it answered or was not asked."""
    driver: DriverView | None = None
    driver_error: str = ""
    """Why the driver's endpoint did not answer."""
    node_devices: Mapping[str, int] | None = None
    """Extended resources of the cluster's nodes: the most that any one node can allot; None: nobody looked."""
