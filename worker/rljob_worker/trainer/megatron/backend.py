"""Megatron as a training backend."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from rljob_api import derived
from rljob_api.spec import Recompute, RLJobSpec
from rljob_worker.devices import Device
from rljob_worker.models.cost import pair_cost, segment_cost
from rljob_worker.models.manifest import hf_manifest
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.tensor_slice import Piece
from rljob_worker.trainer.backend import Compute, CriticBackend, Loaded, TeacherBackend, UpdateResult
from rljob_worker.trainer.batches import MicroBatch, Update
from rljob_worker.trainer.checked_file import CheckedFile
from rljob_worker.trainer.megatron.checkpoint import load_rank, save_rank
from rljob_worker.trainer.megatron.expert_replay import ExpertReplay
from rljob_worker.trainer.megatron.models.convert import local_pieces
from rljob_worker.trainer.megatron.models.platforms import megatron_platform
from rljob_worker.trainer.megatron.parallel_state import lockstep_leader
from rljob_worker.trainer.megatron.pipeline import PipelineRunner
from rljob_worker.trainer.megatron.rank_state import RankState, build_critic_state, build_rank_state, join_ranks
from rljob_worker.trainer.megatron.teacher import MegatronTeacher
from rljob_worker.trainer.megatron.updates import Updater
from rljob_worker.trainer.objective import Loss
from rljob_worker.trainer.rank_backend import RankBackend
from rljob_worker.trainer.rendezvous import Notices
from rljob_worker.trainer.stopping import StopAgreement


class MegatronModel:
    """One rank's part of a model, with its passes, its updates and its file; a `CriticBackend`.

    Args:
        rank: the part.
        precision: of training, as files name it.
        agreement: on stops; one for all models of a rank.
        replay: the engine's choice of experts, where routers take it.
    """

    def __init__(
        self, rank: RankState, precision: str, agreement: StopAgreement, replay: ExpertReplay | None = None
    ) -> None:
        self.rank = rank
        self.pair_cost = pair_cost(rank.config)
        self.trained = rank.parameters
        self.optimizer_state = [*rank.state.flats, *(shard.step for shard in rank.state.shards)]
        self._precision = precision
        self.pipeline = PipelineRunner(rank.ddp, rank.layout, agreement, rank.tp_group, rank.cp_group, replay)
        self._updater = Updater(rank, self.pipeline, replay)

    def forward(self, micro_batches: Sequence[MicroBatch], compute: Compute) -> list[Tensor]:
        """Results of `compute` on the last pipeline stage, [] on the others."""
        return self.pipeline.forward(micro_batches, compute)

    def update(self, update: Update, loss: Loss, learning_rate: float) -> UpdateResult:
        """Gradients of one update's loss, then a clipped Adam update."""
        return self._updater.run(update, loss, learning_rate)

    def save(self, folder: str, *, updates: int) -> CheckedFile:
        """Write this rank's file."""
        return save_rank(self.rank, folder, updates=updates, precision=self._precision)

    def load(self, folder: str) -> Loaded:
        """Read this rank's file, or its parts of all files of another layout."""
        return load_rank(self.rank, folder, precision=self._precision)


class MegatronBackend(MegatronModel, RankBackend):
    """A `TrainerBackend`: the policy's part, and the critic's and the teacher's where there are such.

    Args:
        rank: this rank's part of the policy.
        critic: the same of the critic.
        spec: the job.
        device: the rank's.
        stop: set when a running pass is to end early.
        notices: what the ranks agree on.
        teacher_folder: Hugging Face folder of the teacher, where there is one.
    """

    def __init__(
        self,
        rank: RankState,
        critic: RankState | None,
        spec: RLJobSpec,
        device: Device,
        stop: threading.Event,
        notices: Notices,
        teacher_folder: Path | None = None,
    ) -> None:
        agreement = StopAgreement(
            stop, rank.layout.rank, rank.layout.world_size, lockstep_leader(rank.cp_group), notices
        )
        replay = None
        if spec.rollout.router_replay:
            recomputes = spec.training.recompute is not Recompute.NONE
            replay = ExpertReplay(rank.ddp.module, rank.config, rank.layout, recomputes=recomputes)
        precision = spec.training.precision.value
        MegatronModel.__init__(self, rank, precision, agreement, replay)
        RankBackend.__init__(self, spec, device, rank.memory, rank.groups, rank.parameters)
        self.layout = rank.layout
        self.vocab_size = rank.config.vocab_size
        self.manifest = hf_manifest(rank.config)
        attention = megatron_platform(device.name).attention
        shares = attention.shares_prompts and rank.config.linear_attention is None
        self.segment_cost = segment_cost(rank.config) if shares else None
        self.sync_dtype = rank.parameters[0].dtype
        self.critic: CriticBackend | None = None
        if critic is not None:
            self.critic = MegatronModel(critic, precision, agreement)
        self.teacher: TeacherBackend | None = None
        if teacher_folder is not None:
            self.teacher = MegatronTeacher(rank, spec, device, teacher_folder, agreement)

    @property
    def parameter_count(self) -> int:
        """Elements of this rank's share of the model."""
        return sum(tensor.numel() for tensor in self.rank.named_parameters().values())

    def from_output_rank(self, values: Tensor) -> None:
        """Broadcast from the last pipeline stage."""
        from megatron.core import parallel_state

        if self.layout.pp > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(values, src=last, group=parallel_state.get_pipeline_model_parallel_group())

    def pieces(self, layout: ParallelLayout) -> list[Piece]:
        """Views of the parameters where the layout allows one."""
        return local_pieces(self.rank.ddp.module, self.rank.config, layout)

    def close(self) -> None:
        """Drop Megatron's state and leave the process groups."""
        if dist.is_initialized():
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            self.groups.close()


def build_backend(
    spec: RLJobSpec,
    device: Device,
    *,
    rank: int,
    world_size: int,
    store: str,
    model_folder: Path,
    critic_folder: Path | None = None,
    teacher_folder: Path | None = None,
    stop: threading.Event,
    notices: Notices,
) -> MegatronBackend:
    """See `trainer.build.BuildBackend`."""
    joined = join_ranks(spec, device, rank=rank, world_size=world_size, store=store)
    state, critic, beside = build_rank_state(joined, spec, device, model_folder), None, derived.critic(spec)
    if beside is not None:
        critic = build_critic_state(joined, spec, beside, device, critic_folder or model_folder)
    return MegatronBackend(state, critic, spec, device, stop, notices, teacher_folder)
