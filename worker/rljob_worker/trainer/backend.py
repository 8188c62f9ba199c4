"""Interface of a training backend to the trainer.

`trainer.Trainer` keeps what all of them share: the plan of a step, its loss, going back when a step fails, the learning
rate and what is reported. A backend has the model, its gradients and its optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rljob_worker.algorithms.output_layer import Wanted
from rljob_worker.memory.sleeping import SleepingMemory
from rljob_worker.models.manifest import Manifest
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.tensor_slice import Piece
from rljob_worker.trainer.batches import MicroBatch, Update
from rljob_worker.trainer.checked_file import CheckedFile
from rljob_worker.trainer.objective import Loss, TokenValues
from rljob_worker.trainer.process_groups import ProcessGroups
from rljob_worker.trainer.rank_backend import MemoryMove, Rounding


class Compute(Protocol):
    """The function that is applied to each micro-batch."""

    wanted: Wanted | None
    """Asked of the output layer; None: a critic's values."""

    def __call__(self, index: int, micro_batch: MicroBatch, tokens: TokenValues, /) -> tuple[Tensor, Tensor]:
        """(its share of the loss, a result to collect) of a micro-batch and its index."""
        ...


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Result of an update; the same on all ranks."""

    metrics: dict[str, float]
    """Reduced over micro-batches and ranks, as `objective.MetricReduction` names them."""
    grad_norm: float
    """Global norm before clipping; NaN where it was not computed."""
    fault: str | None
    """Why nothing was applied: where the first non-finite values were."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Origin of a saved state."""

    updates: int
    """Optimizer updates done so far."""
    resharded: str = ""
    """From which parallel layout to which, where they differ."""


class TrainableModel(Protocol):
    """One rank of a model that is trained."""

    trained: list[Tensor]
    """Tensors of this rank's parameters that an update changes, whole buffers where it has such."""
    optimizer_state: list[Tensor]
    """Tensors that the optimizer changes beside them."""

    def update(self, update: Update, loss: Loss, learning_rate: float) -> UpdateResult:
        """One optimizer update: applied whole or not at all, on all ranks alike.

        Raises:
            StopRequested: on all ranks, before the weights changed.
        """
        ...


class CriticBackend(TrainableModel, Protocol):
    """One rank of the critic, whose logits are one column: values. In the memory and the groups of the policy."""

    pair_cost: float
    """See `TrainerBackend`."""

    def forward(self, micro_batches: Sequence[MicroBatch], compute: Compute) -> list[Tensor]:
        """See `TrainerBackend`."""
        ...

    def save(self, folder: str, *, updates: int) -> CheckedFile:
        """See `TrainerBackend`; beside the policy's file."""
        ...

    def load(self, folder: str) -> Loaded:
        """See `TrainerBackend`."""
        ...


class TeacherBackend(Protocol):
    """One rank of the teacher, in the groups of the policy; its weights are on the host where nobody computes."""

    vocab_size: int
    """See `TrainerBackend`."""
    segment_cost: float | None
    """See `TrainerBackend`."""

    def forward(self, micro_batches: Sequence[MicroBatch], compute: Compute) -> list[Tensor]:
        """See `TrainerBackend`; inside `present` alone."""
        ...

    def present(self) -> AbstractContextManager[None]:
        """Inside, the weights are on the device."""
        ...


class TrainerBackend(TrainableModel, Protocol):
    """One rank of the policy. All ranks make the same calls in the same order."""

    layout: ParallelLayout
    vocab_size: int
    """Columns of the logits that are tokens; a backend may have further ones."""
    manifest: Manifest
    """Tensors that engines get."""
    pair_cost: float
    """Work of a token's look at one other, as a part of all else that a token costs (`models.cost`)."""
    segment_cost: float | None
    """Cost of one more sequence in a row beside its tokens, in those units; None where the model or its kernels take
    no rows in which samples share a prompt."""
    sync_dtype: torch.dtype
    """Number format in which they get them."""
    groups: ProcessGroups
    """All that the rank is in."""
    memory: SleepingMemory | None
    """Memory in which the rank's tensors are and sleep; None where the memory saver is off."""
    critic: CriticBackend | None
    """The model beside it that sleeps when this one does; None where the algorithm needs none."""
    teacher: TeacherBackend | None
    """The model that it is brought towards; None where the algorithm has none."""

    @property
    def parameter_count(self) -> int:
        """Elements of this rank's share of the model."""
        ...

    def forward(self, micro_batches: Sequence[MicroBatch], compute: Compute) -> list[Tensor]:
        """Run the model without gradients.

        Returns:
            The results of `compute` where this rank has the output layer, [] elsewhere.

        Raises:
            StopRequested: on all ranks.
        """
        ...

    def reference(self) -> AbstractContextManager[None]:
        """Inside, `forward` computes with the weights that training began with.

        Raises:
            RuntimeError: the job's algorithm needs none, so that they were not kept.
        """
        ...

    def from_output_rank(self, values: Tensor) -> None:
        """Overwrite `values` with those of a rank that has the output layer; of the same shape on all ranks."""
        ...

    def pieces(self, layout: ParallelLayout) -> list[Piece]:
        """The HF tensors' parts that this rank holds, primary as they are in `layout`; for the weight sync."""
        ...

    def handing_over(self) -> AbstractContextManager[Rounding | None]:
        """Around each weight sync, in which pieces are read; collective where it begins.

        Gives what rounding lost, once it is over, where pieces are made of weights and adapters.
        """
        ...

    def save(self, folder: str, *, updates: int) -> CheckedFile:
        """Write this rank's state and the number of updates done, synced to disk; works asleep and awake."""
        ...

    def load(self, folder: str) -> Loaded:
        """Continue from a state that was saved in this parallel layout or another one.

        In another one, weights and optimizer are the saved ones and generators of random numbers are not: they begin
        as in a new job.

        Raises:
            ValueError: it is another precision's or model's, or missing or damaged.
        """
        ...

    def sleep(self) -> MemoryMove:
        """Give the memory of weights, gradients and optimizer away; nothing when asleep."""
        ...

    def wake_up(self) -> MemoryMove:
        """Take it back; nothing when awake. Raises when too little memory is free, and stays asleep then."""
        ...

    def require_awake(self, what: str) -> None:
        """TransitionRefused, naming `what`, when asleep."""
        ...

    def close(self) -> None:
        """Leave the other ranks."""
        ...
