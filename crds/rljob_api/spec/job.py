"""`spec`: one reinforcement-learning post-training job."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.base import ApiModel, NonNegativeInt, PositiveInt, Seed, Text, keyed_by
from rljob_api.spec.algorithm import AlgorithmSpec
from rljob_api.spec.cluster import (
    EnvironmentSpec,
    NetworkSpec,
    PodsSpec,
    ResourcesSpec,
    SchedulingSpec,
    StorageSpec,
)
from rljob_api.spec.colocation import HcclSpec, MemorySaverSpec, WeightSyncSpec
from rljob_api.spec.critic import CriticSpec
from rljob_api.spec.data import DataSpec, EvaluationSpec, RewardSpec
from rljob_api.spec.episodes import EpisodesSpec
from rljob_api.spec.judges import JudgeSpec
from rljob_api.spec.lifecycle import CheckpointSpec, EarlyStopSpec, FailurePolicy, RecordsSpec, TimeoutsSpec
from rljob_api.spec.model import ModelSpec
from rljob_api.spec.rollout import RolloutSpec
from rljob_api.spec.sandbox import SandboxSpec
from rljob_api.spec.training import TrainingSpec


class Mode(StrEnum):
    """Placements of training and generation."""

    COLOCATED = "Colocated"
    """All devices take turns."""
    DISAGGREGATED = "Disaggregated"
    """Trainers and engines have devices of their own; one step ahead at most."""
    ASYNC = "Async"
    """Devices of their own; generation goes on through updates of the weights, `rollout.staleness.max` steps ahead."""


class RLJobSpec(ApiModel):
    """One reinforcement-learning post-training job."""

    steps: PositiveInt
    """Training steps."""
    seed: Seed = 1234
    """Seed of everything random: data order, sampling, dropout."""
    mode: Mode = Mode.COLOCATED
    """Placement of training and generation: `Colocated`, in turn on the same devices; `Disaggregated`, side by side on
    devices of their own, over whole batches; `Async`, the same, and generation goes on through updates of the weights.
    `resources.trainer` and `resources.rollout` say where those of the latter two are."""
    image: Text | None = None
    """Worker image; default: the operator's."""
    model: ModelSpec
    """The policy's starting point."""
    data: DataSpec
    """The prompts."""
    reward: RewardSpec | None = None
    """Scoring of responses; needed unless every data source has its own."""
    evaluation: EvaluationSpec | None = None
    """Scoring on held-out data."""
    episodes: EpisodesSpec | None = None
    """Turns of the policy and an environment; needed where a data source has one."""
    sandbox: SandboxSpec | None = None
    """Runs the programs that the reward `code` tests; default: all of its defaults."""
    judges: Annotated[list[JudgeSpec], Field(max_length=8, json_schema_extra=keyed_by("name"))] = []
    """Models that the reward `judge` asks."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """The algorithm."""
    critic: CriticSpec | None = None
    """The critic of algorithm `ppo`; default: all of its defaults."""
    rollout: RolloutSpec
    """Generation."""
    training: TrainingSpec = TrainingSpec()
    """Training."""
    weight_sync: WeightSyncSpec = WeightSyncSpec()
    """Weight hand-over."""
    resources: ResourcesSpec = ResourcesSpec()
    """Hardware."""
    memory_saver: MemorySaverSpec = MemorySaverSpec()
    """Memory saver."""
    hccl: HcclSpec = HcclSpec()
    """Collective communication."""
    scheduling: SchedulingSpec = SchedulingSpec()
    """Queue and placement."""
    pods: PodsSpec = PodsSpec()
    """Pod settings and template overrides."""
    storage: StorageSpec = StorageSpec()
    """Volumes."""
    environment: EnvironmentSpec = EnvironmentSpec()
    """Environment variables."""
    network: NetworkSpec = NetworkSpec()
    """Network."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Checkpoints."""
    early_stop: EarlyStopSpec | None = None
    """Condition that ends the run before its last step."""
    failure_policy: FailurePolicy = FailurePolicy()
    """Restarts."""
    timeouts: TimeoutsSpec = TimeoutsSpec()
    """Deadlines."""
    records: RecordsSpec = RecordsSpec()
    """Records."""
    suspend: bool = False
    """Save the last completed step and give the devices back."""
    active_deadline_seconds: PositiveInt | None = None
    """The job fails when it has held devices for longer since it first ran, in seconds: restarts count, suspension and
    queueing do not."""
    ttl_seconds_after_finished: NonNegativeInt | None = None
    """A finished job is deleted this long after its end, in seconds; none: it stays."""
