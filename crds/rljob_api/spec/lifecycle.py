"""`spec.checkpoint`, `spec.failurePolicy`, `spec.timeouts`, `spec.records`: what happens around the steps."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from rljob_api.base import ApiModel, Name, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Text, keyed_by


class MetricMode(StrEnum):
    """Direction in which a metric's values get better."""

    MAX = "Max"
    MIN = "Min"


class KeepBestSpec(ApiModel):
    """The checkpoint with the best value of a metric, which is kept however old it is."""

    metric: Name
    """A metric of the step record: `eval/NAME`, `rollout/raw_reward` ... Only steps with both a checkpoint and a value
    count: let `checkpoint.everySteps` and `evaluation.everySteps` fit each other."""
    mode: MetricMode = MetricMode.MAX
    """`Max`: large values are good; `Min`: small ones."""


class EarlyStopSpec(ApiModel):
    """When a run is done before its last step: a success whose last step is saved; status and report say why."""

    metric: Name
    """A metric of the step record: `eval/NAME`, `rollout/raw_reward` ..."""
    mode: MetricMode = MetricMode.MAX
    """`Max`: large values are good; `Min`: small ones."""
    patience: PositiveInt = 5
    """Values in a row, one for each step that has one, without progress."""
    min_change: NonNegativeFloat = 0.0
    """Least change that counts: a value better than the best one by no more than this is no progress."""
    after_step: NonNegativeInt = 0
    """Steps before this one are not looked at."""


class CheckpointSpec(ApiModel):
    """State that a restart continues from."""

    path: Text | None = None
    """Folder for checkpoints; default: `checkpoints` in the run folder."""
    every_steps: PositiveInt = 20
    """Save after every N steps; the last step is always saved."""
    keep: PositiveInt = 3
    """Newest checkpoints that are kept."""
    keep_best: KeepBestSpec | None = None
    """Keep the best one too; `rljob export --best` writes it."""
    grace_seconds: PositiveFloat = 30.0
    """Time a stop request leaves for saving, in seconds."""
    trust_unverified: bool = False
    """Continue from a checkpoint without a checksum of its own, as an earlier version wrote it, if none is verified."""


class FailureReason(StrEnum):
    """Causes of a failed attempt, as the operator distinguishes them.

    Of several that are seen at once the first one here is reported: it explains those after it.
    """

    NODE_LOST = "NodeLost"
    PREEMPTED = "Preempted"
    EVICTED = "Evicted"
    OUT_OF_MEMORY = "OutOfMemory"
    HEAD_LOST = "HeadLost"
    POD_LOST = "PodLost"
    READY_TIMEOUT = "ReadyTimeout"
    START_TIMEOUT = "StartTimeout"
    PHASE_TIMEOUT = "PhaseTimeout"
    HCCL_FAILED = "HcclFailed"
    DRIVER_EXITED = "DriverExited"


class FailureAction(StrEnum):
    """Action after a failed attempt."""

    RESTART = "Restart"
    FAIL = "Fail"
    IGNORE = "Ignore"


class FailureRule(ApiModel):
    """Action for one kind of failure. All conditions that are given must hold."""

    name: Name | None = None
    """Name in events and in the status."""
    exit_codes: Annotated[
        list[Annotated[int, Field(ge=0, le=255, json_schema_extra={"format": "int32"})]], Field(max_length=32)
    ] = []
    """Exit codes of the driver, 128 and the number for a signal; empty: any."""
    reasons: Annotated[list[FailureReason], Field(max_length=16)] = []
    """Causes as the operator saw them; empty: any. `Evicted` stands for `Preempted` too."""
    action: FailureAction
    """`Restart`: a new attempt that counts; `Fail`: the job fails now; `Ignore`: a new attempt that does not count
    against `maxRestarts`."""


class FailurePolicy(ApiModel):
    """Reaction of the operator to failed attempts."""

    max_restarts: NonNegativeInt = 3
    """Restarts before the job fails."""
    backoff_seconds: PositiveFloat = 10.0
    """Wait before a restart, in seconds; doubles up to `maxBackoffSeconds` for each attempt in a row that completed no
    step."""
    max_backoff_seconds: PositiveFloat = 600.0
    """Longest wait between restarts, in seconds."""
    rules: Annotated[list[FailureRule], Field(max_length=32)] = []
    """The first rule that matches decides; without one: `Fail` for exit code 2 (an error of the user), `Ignore` for a
    driver that someone stopped (exit code 75) and for a preemption by the queue, else `Restart`."""


class TimeoutsSpec(ApiModel):
    """Deadlines in seconds. Past one of the driver's, all processes' stacks are written and the job fails with the
    phase's name."""

    ready_seconds: PositiveFloat = 1800.0
    """From all pods on their nodes to all pods ready; images are pulled meanwhile. Past it the devices are given back
    (`ReadyTimeout`), and `failurePolicy` decides whether the pods are made anew."""
    start_seconds: PositiveFloat = 1800.0
    """From the driver's start to all processes ready."""
    phase_seconds: PositiveFloat = 3600.0
    """Any phase without an entry in `phases`."""
    phases: Annotated[dict[str, PositiveFloat], Field(max_length=32)] = {}
    """Seconds for single phases, by their names in the step record (`rollout`, `actor_train`, `update_weights` ...)."""


class TrackerSpec(ApiModel):
    """An experiment tracker that gets each step's scalars, tables of samples and the job as its configuration.

    Its package is an extra of its own (`pip install 'rljob[wandb]'`). Keys come from the environment alone: a Secret of
    `environment.secrets` with the variables that the package reads (`WANDB_API_KEY`, `MLFLOW_TRACKING_TOKEN`,
    `CLEARML_API_ACCESS_KEY` and `CLEARML_API_SECRET_KEY`, `SWANLAB_API_KEY`, `TRACKIO_WRITE_TOKEN`).
    """

    name: Literal["wandb", "mlflow", "clearml", "swanlab", "trackio"]
    """W&B, MLflow, ClearML, SwanLab or Trackio."""
    project: Name = "rljob"
    """Project; MLflow's experiment."""
    run: Name | None = None
    """Name of the run; default: the job's name. A restarted job continues the run, whose id is in the run folder."""
    workspace: Name | None = None
    """Team or user that the project belongs to: W&B's entity, SwanLab's workspace."""
    url: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9+.-]*://[^@?\s]+$", max_length=1024)] | None = None
    """Address of the server, without a key; default: what the package's variables say, else its public server (Trackio:
    a database in the run folder)."""
    offline: bool = False
    """Write to the run folder and use no network; what is there can be sent later, with the package's own tools."""
    samples: Annotated[int, Field(ge=0, le=256)] = 8
    """Rows of a table of samples; 0: no tables."""
    samples_every_steps: PositiveInt = 10
    """A table every Nth step."""
    finish_seconds: Annotated[float, Field(gt=0, le=600)] = 30.0
    """Seconds that the job's end may wait for delivery of the last values; a stop request's grace period is not made
    longer. Undelivered values are reported."""


class OtlpSpec(ApiModel):
    """An OpenTelemetry collector that gets each step as a trace, by OTLP over HTTP with JSON.

    The headers that it asks for come from the environment alone: a Secret of `environment.secrets` with
    `OTEL_EXPORTER_OTLP_HEADERS` (`name=value,name=value`).
    """

    endpoint: Annotated[str, Field(pattern=r"^https?://[^@?#\s]+$", max_length=1024)]
    """Address of the collector, as `http://collector:4318`; requests go to `/v1/traces` below it."""
    timeout_seconds: Annotated[float, Field(gt=0, le=60)] = 10.0
    """Limit of a request, in seconds. Steps wait meanwhile, at most 256 of them; none holds the run up."""
    finish_seconds: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Seconds that the job's end may wait for delivery of the last steps; a stop request's grace period is not made
    longer."""


class ProfileSpec(ApiModel):
    """Steps whose training and generation are profiled, operator by operator, by torch's or torch_npu's profiler."""

    first_step: PositiveInt
    """The first of them; one that a resume has behind it is not profiled."""
    steps: Annotated[int, Field(ge=1, le=100)] = 1
    """Number of steps, one after the other."""
    ranks: Annotated[list[NonNegativeInt], Field(max_length=64)] = [0]
    """Trainers by rank, whose `actor_train` is profiled; empty: none."""
    engines: Annotated[list[NonNegativeInt], Field(max_length=64)] = [0]
    """Engines by number, whose generation is profiled; empty: none."""
    stacks: bool = False
    """Whether each operator has the Python lines that called it: files about four times as large."""
    max_mebibytes: Annotated[int, Field(ge=1, le=999_999)] = 512
    """Most MiB of all files together, packed. A file above its share is not kept; when all is used, no further step is
    profiled."""


class RecordsSpec(ApiModel):
    """Records of each step beside `steps.jsonl`."""

    trajectories_every_steps: NonNegativeInt = 1
    """Write trajectories of every Nth step; 0 writes none."""
    trajectories_per_step: PositiveInt | None = None
    """At most this many samples a step (whole groups first); default: all."""
    journal: bool = False
    """Keep each step's samples whole: tokens, the engine's log-probabilities, versions, seeds and rewards, about 7
    bytes a token. `rljob replay` samples a step again with them, from a checkpoint."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    trackers: Annotated[list[TrackerSpec], Field(max_length=5, json_schema_extra=keyed_by("name"))] = []
    """Experiment trackers beside TensorBoard, each at most once. They run beside the job: one that fails neither ends
    nor delays it."""
    otlp: OtlpSpec | None = None
    """Send each step as an OpenTelemetry trace. It goes on beside the job: an endpoint that hangs or is away neither
    ends nor delays it."""
    profile: ProfileSpec | None = None
    """Profile some steps: `profiles/step-N/` in the run folder gets a file for each rank and engine. `rljob profile`
    asks a running job for others."""
    http_port: Annotated[int, Field(ge=0, le=65535)] | None = 0
    """Port of the driver's HTTP endpoint; 0 picks a free one (written to `http.json` in the run folder), null serves
    none."""
    http_host: Name = "127.0.0.1"
    """Address that the endpoint listens on."""
    linger_seconds: NonNegativeFloat = 0.0
    """Seconds that the driver waits at the end for the last step record to be read over HTTP."""
