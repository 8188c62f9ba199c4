"""One optimizer update: gradients, checks, Adam."""

from __future__ import annotations

import math

from rljob_worker.trainer.backend import UpdateResult
from rljob_worker.trainer.batches import Update
from rljob_worker.trainer.megatron.expert_replay import ExpertReplay
from rljob_worker.trainer.megatron.pipeline import PipelineRunner
from rljob_worker.trainer.megatron.rank_state import RankState
from rljob_worker.trainer.non_finite import bad_micro_batches, findings_of_all_ranks
from rljob_worker.trainer.objective import Loss, MetricReduction


class Updater:
    """Runs optimizer updates; an update is applied whole or not at all, on all ranks alike."""

    def __init__(self, rank: RankState, pipeline: PipelineRunner, replay: ExpertReplay | None = None) -> None:
        self._rank = rank
        self._replay = replay
        self._pipeline = pipeline
        self._reduction = MetricReduction(rank.layout.answers, rank.layout.world_size)

    def run(self, update: Update, loss: Loss, learning_rate: float) -> UpdateResult:
        """Gradients of one update's loss, then a clipped Adam update; collective.

        Raises:
            StopRequested: before the weights changed.
        """
        rows = self._pipeline.forward_backward(update.micro_batches, loss)
        metrics = self._reduction.reduce(loss.names, rows)
        if self._replay is not None:
            metrics["router_mismatch"] = self._router_mismatch(self._replay)
        if not math.isfinite(metrics["loss"]):
            return UpdateResult(metrics, math.nan, self._everywhere(bad_micro_batches(update, loss, rows)))
        optimizer = self._rank.optimizer
        with self._rank.state.updating():
            optimizer.prepare_grads()
            norm = float(optimizer.get_grad_norm())
            if not math.isfinite(norm):
                return UpdateResult(metrics, norm, self._everywhere(self._bad_gradients()))
            self._clip(norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            self._rank.state.apply()
        return UpdateResult(metrics, norm, None)

    def _router_mismatch(self, replay: ExpertReplay) -> float:
        """Share of the choices that the routers would have made otherwise; collective.

        Raises:
            RuntimeError: no router of any rank took its given choice.
        """
        other, told = self._reduction.summed(replay.counts().double()).tolist()
        if not told:
            raise RuntimeError("train: no router took the engine's experts (rollout.routerReplay)")
        return float(other / told)

    def _clip(self, norm: float) -> None:
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        for part in self._rank.optimizer.chained_optimizers:
            if not part.is_stub_optimizer and part.config.clip_grad > 0:
                clip_grad_by_total_norm_fp32(part.get_parameters(), part.config.clip_grad, norm)

    def _bad_gradients(self) -> list[str]:
        return [
            f"gradient of {name}"
            for name, parameter in self._rank.ddp.module.named_parameters()
            if not bool(parameter.main_grad.isfinite().all())
        ]

    def _everywhere(self, found: list[str]) -> str:
        return findings_of_all_ranks(found, self._rank.layout.world_size)
