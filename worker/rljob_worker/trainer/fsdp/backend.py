"""FSDP as a training backend."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rljob_api import derived
from rljob_api.spec import LoraHandover, Precision, RLJobSpec
from rljob_worker.devices import Device
from rljob_worker.models.cost import pairs_share
from rljob_worker.models.facts import ModelFacts
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.tensor_slice import Piece
from rljob_worker.trainer.backend import Compute, CriticBackend, Loaded, TeacherBackend, UpdateResult
from rljob_worker.trainer.batches import MicroBatch, Update
from rljob_worker.trainer.checked_file import CheckedFile
from rljob_worker.trainer.fsdp.checkpoint import load_rank, save_rank
from rljob_worker.trainer.fsdp.pieces import pieces_of_rows
from rljob_worker.trainer.fsdp.rank_state import Joined, RankState, build_critic_state, build_rank_state, join_ranks
from rljob_worker.trainer.fsdp.teacher import FsdpTeacher
from rljob_worker.trainer.fsdp.updates import Passes, Updater
from rljob_worker.trainer.objective import Loss
from rljob_worker.trainer.rank_backend import RankBackend, Rounding
from rljob_worker.trainer.rendezvous import Notices
from rljob_worker.trainer.stopping import StopAgreement


class FsdpModel:
    """One rank's rows of any transformers model, with its passes, its updates and its file; a `CriticBackend`.

    Args:
        rank: the rows.
        clip_grad: bound of the norm of an update's gradients.
        precision: of training, as files name it.
        agreement: on stops; one for all models of a rank.
    """

    def __init__(self, rank: RankState, clip_grad: float, precision: str, agreement: StopAgreement) -> None:
        self.rank = rank
        self.facts = ModelFacts.from_hf(rank.model_folder)
        self.pair_cost = pairs_share(self.facts, self.facts.num_layers, rank.model.passed)
        self.trained = list(rank.shards.trained.values())
        self.optimizer_state = [*rank.optimizer.flats, rank.optimizer.steps]
        self._precision = precision
        self._passes = Passes(rank.model, rank.layout, agreement, rank.device)
        self._updater = Updater(self._passes, rank.optimizer, rank.layout, clip_grad)

    def forward(self, micro_batches: Sequence[MicroBatch], compute: Compute) -> list[Tensor]:
        """Results of `compute`, on every rank."""
        return self._passes.without_gradients(micro_batches, compute)

    def update(self, update: Update, loss: Loss, learning_rate: float) -> UpdateResult:
        """Gradients of one update's loss, then a clipped AdamW update."""
        return self._updater.run(update, loss, learning_rate)

    def save(self, folder: str, *, updates: int) -> CheckedFile:
        """Write this rank's file."""
        return save_rank(self.rank, folder, updates=updates, precision=self._precision)

    def load(self, folder: str) -> Loaded:
        """Read this rank's file, or its rows of all files of another layout or backend."""
        return load_rank(self.rank, folder, precision=self._precision)


class FsdpBackend(FsdpModel, RankBackend):
    """A `TrainerBackend`: the policy's rows, and the critic's and the teacher's where there are such.

    Args:
        joined: the rank among the others.
        rank: its rows of the policy.
        critic: its rows of the critic.
        teacher_folder: Hugging Face folder of the teacher, where there is one.
        spec: the job.
        stop: set when a running pass is to end early.
        notices: what the ranks agree on.
    """

    def __init__(
        self,
        joined: Joined,
        rank: RankState,
        critic: RankState | None,
        teacher_folder: Path | None,
        spec: RLJobSpec,
        stop: threading.Event,
        notices: Notices,
    ) -> None:
        training, layout = spec.training, rank.layout
        agreement = StopAgreement(stop, layout.rank, layout.world_size, 0, notices)
        FsdpModel.__init__(self, rank, training.optimizer.clip_grad, training.precision.value, agreement)
        starting = None if rank.adapters is None else rank.adapters.off
        RankBackend.__init__(self, spec, joined.device, joined.memory, joined.groups, self.trained, starting)
        self.layout = layout
        self.vocab_size = self.facts.vocab_size
        # transformers' attention is told of no prompts that samples share.
        self.segment_cost: float | None = None
        self._merges = rank.lora is None or rank.lora.handover is LoraHandover.MERGED
        self.manifest = [(view.name, view.shape) for view in (rank.views if self._merges else rank.saved_views)]
        self.sync_dtype = torch.bfloat16 if training.precision is Precision.BF16 else torch.float32
        beside = derived.critic(spec)
        self.critic: CriticBackend | None = None
        if critic is not None and beside is not None:
            self.critic = FsdpModel(critic, beside.optimizer.clip_grad, training.precision.value, agreement)
        self.teacher: TeacherBackend | None = None
        if teacher_folder is not None:
            self.teacher = FsdpTeacher(joined, spec, teacher_folder, agreement)

    @property
    def parameter_count(self) -> int:
        """Elements of this rank's rows."""
        return sum(rows.numel() for rows in self.rank.shards.rows.values())

    def from_output_rank(self, values: Tensor) -> None:
        """Nothing: every rank has the output layer."""

    def pieces(self, layout: ParallelLayout) -> list[Piece]:
        """Views of this rank's rows; where they have adapters, made when they are read, in a hand-over.

        Where engines get adapters alone, those of adapters alone.
        """
        rank = self.rank
        if rank.adapters is not None and not self._merges:
            adapters, computed = rank.shards.trained, rank.adapters.scaled_rows
            return pieces_of_rows(adapters, rank.saved_views, rank.shards.sizes, layout, computed=computed)
        computed = {} if rank.adapters is None else rank.adapters.merged_rows
        return pieces_of_rows(rank.shards.rows, rank.views, rank.shards.sizes, layout, computed=computed)

    def handing_over(self) -> AbstractContextManager[Rounding | None]:
        """Adapters are put together for it, to be merged."""
        if self.rank.adapters is None or not self._merges:
            return nullcontext()
        return self.rank.adapters.gathered()

    def close(self) -> None:
        """Leave the process groups."""
        if dist.is_initialized():
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
) -> FsdpBackend:
    """See `trainer.build.BuildBackend`."""
    joined = join_ranks(spec, device, rank=rank, world_size=world_size, store=store)
    rows, critic, beside = build_rank_state(joined, spec, model_folder), None, derived.critic(spec)
    if beside is not None:
        critic = build_critic_state(joined, spec, beside, critic_folder or model_folder)
    return FsdpBackend(joined, rows, critic, teacher_folder, spec, stop, notices)
