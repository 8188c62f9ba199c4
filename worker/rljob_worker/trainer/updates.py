"""One optimizer update: gradients, checks, Adam."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rljob_worker.trainer.batches import Update
from rljob_worker.trainer.objective import MetricReduction, PolicyLoss
from rljob_worker.trainer.passes import Passes
from rljob_worker.trainer.rank import Rank


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update did; the same on all ranks."""

    metrics: dict[str, float]
    """Reduced over micro-batches and ranks, as `MetricReduction` names them."""
    grad_norm: float
    """Global norm before clipping; NaN where it was not computed."""
    fault: str | None
    """Why nothing was applied: where the first non-finite values were."""


class Updater:
    """Runs optimizer updates; an update is applied whole or not at all, on all ranks alike."""

    def __init__(self, rank: Rank, passes: Passes) -> None:
        self._rank = rank
        self._passes = passes
        place = rank.coordinates
        self._reduction = MetricReduction(place.last_stage and place.tp_rank == 0, place.world_size)

    def run(self, update: Update, loss: PolicyLoss, learning_rate: float) -> UpdateResult:
        """Gradients of one update's loss, then a clipped Adam update; collective.

        Raises:
            StopRequested: before the weights changed.
        """
        rows = self._passes.forward_backward(update.micro_batches, loss)
        metrics = self._reduction.reduce(loss.names, rows)
        if not math.isfinite(metrics["loss"]):
            return UpdateResult(metrics, math.nan, self._everywhere(self._bad_micro_batches(update, loss, rows)))
        optimizer = self._rank.optimizer
        with self._rank.state.present():
            optimizer.prepare_grads()
            norm = float(optimizer.get_grad_norm())
            if not math.isfinite(norm):
                return UpdateResult(metrics, norm, self._everywhere(self._bad_gradients()))
            self._clip(norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step_with_ready_grads()
        return UpdateResult(metrics, norm, None)

    def _clip(self, norm: float) -> None:
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        for part in self._rank.optimizer.chained_optimizers:
            if not part.is_stub_optimizer and part.config.clip_grad > 0:
                clip_grad_by_total_norm_fp32(part.get_parameters(), part.config.clip_grad, norm)

    def _bad_micro_batches(self, update: Update, loss: PolicyLoss, rows: Sequence[Tensor]) -> list[str]:
        if not rows:
            return []
        values = torch.stack(list(rows))[:, loss.names.index("loss")]
        return [
            f"loss of micro-batch {i} is {values[i].item()} (samples {update.micro_batches[i].samples.tolist()})"
            for i in range(len(values))
            if not math.isfinite(values[i].item())
        ]

    def _bad_gradients(self) -> list[str]:
        return [
            f"gradient of {name}"
            for name, parameter in self._rank.ddp.module.named_parameters()
            if not bool(parameter.main_grad.isfinite().all())
        ]

    def _everywhere(self, found: list[str]) -> str:
        """The first findings of all ranks, with their ranks; collective."""
        place = self._rank.coordinates
        everyone: list[Any] = [found]
        if place.world_size > 1:
            everyone = [None] * place.world_size
            dist.all_gather_object(everyone, found)
        text = "; ".join(
            f"rank {number}: {', '.join(items[:3])}{f' and {len(items) - 3} more' if len(items) > 3 else ''}"
            for number, items in enumerate(everyone)
            if items
        )
        return f"not finite: {text or 'the sum of finite values'}"
