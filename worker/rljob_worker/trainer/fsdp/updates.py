"""Passes over micro-batches and one optimizer update: gradients, checks, AdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.trainer.backend import Compute, UpdateResult
from rljob_worker.trainer.batches import MicroBatch, Update
from rljob_worker.trainer.fsdp.model import ShardedModel
from rljob_worker.trainer.fsdp.optimizer import ShardedAdamW
from rljob_worker.trainer.non_finite import bad_micro_batches, findings_of_all_ranks
from rljob_worker.trainer.objective import Loss, MetricReduction
from rljob_worker.trainer.row_shares import share_of
from rljob_worker.trainer.stopping import StopAgreement


class Passes:
    """Forward and forward-backward passes of the model over micro-batches.

    Ranks that divide a copy, or a row, depend on one another in each micro-batch; others do so in backward passes
    alone, where gradients are added up over them. The leader of a stop follows from that.
    """

    def __init__(self, model: ShardedModel, layout: ParallelLayout, stop: StopAgreement, device: torch.device) -> None:
        self._model, self._layout, self._stop, self._device = model, layout, stop, device

    def without_gradients(self, micro_batches: Sequence[MicroBatch], compute: Compute) -> list[Tensor]:
        """Results of `compute`; raises StopRequested on all ranks."""
        results = []
        self._stop.begin_pass(self._layout.rank - self._layout.rank % math.lcm(self._layout.shards, self._layout.cp))
        with torch.no_grad(), self._model.passing():
            for index, micro_batch in enumerate(micro_batches):
                if not self._stop.skip():
                    results.append(self._computed(index, micro_batch, compute)[1])
        self._stop.finish_pass()
        return results

    def gradients(
        self, micro_batches: Sequence[MicroBatch], compute: Compute
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Same as `without_gradients`, and this rank's rows of the gradients of the summed losses, summed over the
        ranks."""
        results = []
        self._model.drop_gradients()
        self._stop.begin_pass(0)
        with self._model.passing():
            for index, micro_batch in enumerate(micro_batches):
                if not self._stop.skip():
                    loss, result = self._computed(index, micro_batch, compute)
                    loss.backward()
                    results.append(result)
        self._stop.finish_pass()
        return results, self._model.take_gradients()

    def _computed(self, index: int, micro_batch: MicroBatch, compute: Compute) -> tuple[Tensor, Tensor]:
        """Loss and result of a row, which ranks of one context compute alike."""
        layout = self._layout
        row = micro_batch.padded(layout.cp)
        share = share_of(row, layout.cp_rank, layout.cp).to(self._device)
        whole = share.inputs if layout.cp == 1 else row.to(self._device)
        return compute(index, whole, self._model.tokens(share, compute.wanted))


class Updater:
    """Runs optimizer updates; an update is applied whole or not at all, on all ranks alike."""

    def __init__(self, passes: Passes, optimizer: ShardedAdamW, layout: ParallelLayout, clip_grad: float) -> None:
        self._passes, self._optimizer, self._layout, self._clip_grad = passes, optimizer, layout, clip_grad
        self._reduction = MetricReduction(layout.answers, layout.world_size)

    def run(self, update: Update, loss: Loss, learning_rate: float) -> UpdateResult:
        """Gradients of one update's loss, then a clipped AdamW update; collective.

        Raises:
            StopRequested: before the weights changed.
        """
        rows, gradients = self._passes.gradients(update.micro_batches, loss)
        metrics = self._reduction.reduce(loss.names, rows)
        if not math.isfinite(metrics["loss"]):
            return UpdateResult(metrics, math.nan, self._everywhere(bad_micro_batches(update, loss, rows)))
        norm = self._norm(gradients)
        if not math.isfinite(norm):
            bad = [f"gradient of {name}" for name, tensor in gradients.items() if not bool(tensor.isfinite().all())]
            return UpdateResult(metrics, norm, self._everywhere(bad))
        if self._clip_grad > 0 and norm > self._clip_grad:
            # As Megatron's: torch.nn.utils.clip_grad_norm_ has the same 1e-6.
            torch._foreach_mul_(list(gradients.values()), self._clip_grad / (norm + 1e-6))
        self._optimizer.step(gradients, learning_rate)
        return UpdateResult(metrics, norm, None)

    def _norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Norm of all gradients, equal to the bit on all ranks: float64 squares are added up in the order of the
        ranks."""
        norms = torch._foreach_norm([tensor for tensor in gradients.values() if tensor.numel()])
        squares = torch.stack(norms).cpu().double().square().sum().view(1)
        if self._layout.rank >= self._layout.shards:
            # Another copy's are the same, and count once.
            squares = torch.zeros_like(squares)
        return math.sqrt(float(self._reduction.summed(squares)))

    def _everywhere(self, found: list[str]) -> str:
        return findings_of_all_ranks(found, self._layout.world_size)
