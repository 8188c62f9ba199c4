"""`status` of an RLJob: written by the operator, read by people."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from rljob_api.base import INT64_MAX, Measured, Name, NonNegativeInt, StatusModel, keyed_by

Generation = Annotated[int, Field(ge=0, le=INT64_MAX, json_schema_extra={"format": "int64"})]
Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Message = Annotated[str, Field(max_length=32768)]
ExitCode = Annotated[int, Field(ge=-255, le=255, json_schema_extra={"format": "int32"})]


class JobPhase(StrEnum):
    """Summary of the conditions."""

    PENDING = "Pending"
    QUEUED = "Queued"
    STARTING = "Starting"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class ConditionType(StrEnum):
    """Observations of the operator."""

    QUEUED = "Queued"
    CLUSTER_READY = "ClusterReady"
    RUNNING = "Running"
    CHECKPOINTING = "Checkpointing"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class Condition(StatusModel):
    """One observation of the job, as in `metav1.Condition`."""

    type: Annotated[
        str,
        Field(pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=316),
    ]
    """Observation: `Queued`, `ClusterReady`, `Running`, `Checkpointing`, `Suspended`, `Succeeded` or `Failed`."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", max_length=1024)]
    """Why, in one word."""
    message: Message = ""
    """Why, in a sentence."""
    last_transition_time: Time
    """When `status` last changed."""
    observed_generation: Generation | None = None
    """The generation of the spec that was looked at."""


class CheckpointStatus(StatusModel):
    """The newest complete checkpoint."""

    step: NonNegativeInt
    """Steps completed in it."""
    path: Message | None = None
    """Its folder."""
    time: Time | None = None
    """When it was written."""


class LastStep(StatusModel):
    """The last completed step, as in its record."""

    step: NonNegativeInt
    """Its number."""
    seconds: Measured | None = None
    """Wall-clock seconds."""
    phase_seconds: Annotated[dict[str, Measured], Field(max_length=64)] = {}
    """Seconds of each phase by name."""
    switch_seconds: Measured | None = None
    """Seconds that sharing the devices took: sleeping, waking and handing the weights over."""
    log_prob_abs_diff: Measured | None = None
    """Mean absolute difference of engine and trainer log-probabilities."""
    time: Time | None = None
    """When it ended."""


class Progress(StatusModel):
    """Progress of the training."""

    step: NonNegativeInt = 0
    """Completed steps."""
    steps: NonNegativeInt = 0
    """Steps of the job."""
    eta_seconds: Measured | None = None
    """Estimated seconds until the last step ends."""
    eta: Name | None = None
    """The same for people, like `3h12m`."""
    step_seconds: Measured | None = None
    """Median seconds of the recent steps."""
    reward_mean: float | None = None
    """Mean reward of the last step."""
    weight_version: NonNegativeInt | None = None
    """Version of the weights that the engines hold."""
    last_step: LastStep | None = None
    """The last completed step."""
    stopped_early: Message | None = None
    """Why `spec.earlyStop` ended the run before its last step."""
    last_checkpoint: CheckpointStatus | None = None
    """The checkpoint that a restart continues from."""
    last_update_time: Time | None = None
    """When the operator last read the driver's records."""


class AttemptStatus(StatusModel):
    """One run of the driver."""

    number: NonNegativeInt
    """0 for the first."""
    submission_id: Name | None = None
    """Id of the Ray job."""
    accepted: bool = False
    """Whether Ray has confirmed the submission."""
    accept_time: Time | None = None
    """When the operator saw that; `timeouts.startSeconds` counts from here."""
    head_uid: Name | None = None
    """UID of the head pod that the driver was submitted to."""
    session: Name | None = None
    """Name of the Ray session that the driver was submitted to; another one means that the head was lost."""
    steps: NonNegativeInt | None = None
    """`spec.steps` as the driver got it."""
    run_attempt: NonNegativeInt | None = None
    """The driver's own count of attempts in its run folder; it begins anew in a new folder."""
    start_time: Time | None = None
    """When the driver was submitted."""
    notice_time: Time | None = None
    """When the operator first saw what `reason` names, while the driver had not ended yet."""
    stop_time: Time | None = None
    """When the operator asked the driver to stop."""
    end_time: Time | None = None
    """When it ended."""
    start_step: NonNegativeInt | None = None
    """Completed steps when the driver was first seen ready: what it continued from."""
    end_step: NonNegativeInt | None = None
    """Completed steps at its end."""
    reason: Name | None = None
    """Why it ended, in one word."""
    message: Message | None = None
    """Why it ended, in a sentence; names the phase."""
    exit_code: ExitCode | None = None
    """Exit code of the driver; negative: the signal that ended it."""
    counted: bool = False
    """Whether it counts against `failurePolicy.maxRestarts`."""
    last_log_lines: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=50)] = []
    """The driver's last lines, kept before the pods go."""
    unwritten: Annotated[list[Annotated[str, Field(max_length=100)]], Field(max_length=16)] = []
    """Files that it could not write and went on without: `step records` and `events`, which wait, `trajectories`,
    ..."""


class ClusterStatus(StatusModel):
    """The Ray cluster of the job."""

    name: Name | None = None
    """Name of the RayCluster."""
    uid: Name | None = None
    """Its UID."""
    head_pod: Name | None = None
    """Name of the head pod."""
    dashboard: Message | None = None
    """Address of Ray's dashboard inside the cluster."""
    ready_workers: NonNegativeInt | None = None
    """Worker pods that are ready."""
    engine_nodes: NonNegativeInt | None = None
    """Nodes whose engines take part, where `resources.rollout.nodes` may change while the job runs."""
    released_uid: Name | None = None
    """UID of the RayCluster whose devices were given back last."""
    scheduled_time: Time | None = None
    """Since when all of its pods have their nodes while not all are ready; `timeouts.readySeconds` counts from here."""


class CheckpointRequest(StatusModel):
    """The newest value of the annotation `rljob.dev/checkpoint-requested` that was handed to the driver."""

    value: Name
    """The annotation's value; a digest of it where it is longer than 200 characters."""
    time: Time
    """When the driver was asked."""
    step: NonNegativeInt
    """Completed steps at that time."""


class Goodput(StatusModel):
    """Use of the job's time, in seconds; times devices: device-seconds.

    The time since `since` belongs to the present phase and is not in the sums yet.
    """

    since: Time | None = None
    """When the present phase began."""
    queued_seconds: Measured = 0.0
    """Waiting for devices."""
    starting_seconds: Measured = 0.0
    """Devices held, driver not ready: pods starting, waiting for a restart, loading."""
    running_seconds: Measured = 0.0
    """Driver ready; what of it is in no step is overhead."""
    active_seconds: Measured = 0.0
    """Devices held since the job first ran: what `activeDeadlineSeconds` limits."""
    useful_seconds: Measured = 0.0
    """In steps that count."""
    lost_seconds: Measured = 0.0
    """In steps that were run again after a restart."""
    lost_steps: NonNegativeInt = 0
    """Number of such steps."""
    abandoned_seconds: Measured = 0.0
    """The part of `lostSeconds` whose records were lost with their run folder."""
    abandoned_steps: NonNegativeInt = 0
    """The same in steps."""


class RLJobStatus(StatusModel):
    """State that the operator has observed."""

    phase: JobPhase | None = None
    """Summary of the conditions."""
    message: Message | None = None
    """Why the job is in this phase, in a sentence."""
    observed_generation: Generation | None = None
    """The generation of the spec that this status belongs to."""
    conditions: Annotated[
        list[Condition],
        Field(max_length=16, json_schema_extra=keyed_by("type")),
    ] = []
    """Observations with reasons."""
    queue: Name | None = None
    """Queue that the job waits in or was admitted by."""
    start_time: Time | None = None
    """When the job was first seen."""
    running_time: Time | None = None
    """When the driver was first ready."""
    completion_time: Time | None = None
    """When the job ended."""
    progress: Progress | None = None
    """Progress of the training."""
    attempt: NonNegativeInt | None = None
    """Number of the current attempt."""
    restarts: NonNegativeInt | None = None
    """Restarts that counted."""
    failed_attempts: Annotated[dict[str, NonNegativeInt], Field(max_length=32)] | None = None
    """Number of attempts that failed for each reason and were followed by another: all of them, also those that
    `attempts` lists no more."""
    attempts: Annotated[
        list[AttemptStatus],
        Field(max_length=10, json_schema_extra=keyed_by("number")),
    ] = []
    """The newest attempts, with exit codes and last log lines."""
    next_attempt_time: Time | None = None
    """When the next attempt may begin, while a restart's back-off lasts."""
    checkpoint_request: CheckpointRequest | None = None
    """The checkpoint that was last asked for by annotation."""
    cluster: ClusterStatus | None = None
    """The Ray cluster."""
    goodput: Goodput | None = None
    """Use of the job's time."""
    writes: NonNegativeInt = 0
    """Number of the operator's writes of this status; the rules about changes of the spec pass over such writes."""
