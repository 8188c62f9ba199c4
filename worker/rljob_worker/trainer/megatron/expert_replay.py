"""Routing by the engine's choice of experts, on the routers of Megatron's model (R3, arXiv 2510.11370)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from rljob_worker.models.config import ModelConfig
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.trainer.batches import MicroBatch
from rljob_worker.upstream.megatron_moe import RouterReplay, watch_choices


class ExpertReplay:
    """Tells this rank's routers, before each runs, which experts its tokens go to; the weights of the experts are still
    the router's, and learned.

    Megatron's own `RouterReplay` keeps one choice a router. Here a router that runs a second time, when activations are
    recomputed, gets that of the micro-batch whose turn it is: with pipeline stages others ran since.

    Args:
        model: with `moe_enable_routing_replay`.
        config: of the whole model.
        layout: where this rank is.
        recomputes: whether routers run again in the backward pass.
    """

    def __init__(self, model: nn.Module, config: ModelConfig, layout: ParallelLayout, *, recomputes: bool) -> None:
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        self._rank, self._shares = layout.tp_rank, layout.tp
        self._recomputes = recomputes
        self._learning = False
        self._experts: Tensor | None = None
        self._counted: Tensor | None = None
        self._counts = torch.zeros(2, dtype=torch.int64)
        self._shape = (sum(config.moe_layers), config.experts_per_token)
        self._again: dict[nn.Module, deque[Tensor | None]] = {}
        self._replay = RouterReplayAction.REPLAY_FORWARD
        for router in model.modules():
            if isinstance(router, TopKRouter):
                assert router.layer_number is not None
                self._again[router] = deque()
                place = sum(config.moe_layers[: router.layer_number - 1])
                router.register_forward_pre_hook(partial(self._choose, place, router.router_replay))
                watch_choices(router.router_replay, self._count)

    def begin_pass(self, *, learning: bool) -> None:
        """A forward pass begins, with a backward pass where it is `learning`; what an earlier one left is dropped."""
        self._learning = learning
        self._counts = torch.zeros(2, dtype=torch.int64)
        for waiting in self._again.values():
            waiting.clear()

    def use(self, micro_batch: MicroBatch) -> None:
        """Set the next micro-batch to compute; without experts, the routers choose.

        With sequence parallelism each tensor-parallel rank has its share of the positions, whose number is a multiple
        of the ranks'.

        Args:
            micro_batch: on this rank's device.

        Raises:
            ValueError: the experts are not those of this model.
        """
        experts, counted = micro_batch.experts, None
        if experts is not None:
            if experts.shape[2:] != self._shape:
                raise ValueError(
                    f"experts of {experts.shape[2]} layers, {experts.shape[3]} of each token; the model has "
                    f"{self._shape[0]} layers with experts, {self._shape[1]} of each token"
                )
            counted = torch.zeros(len(experts), dtype=torch.bool, device=experts.device)
            counted[micro_batch.rows] = True
            if self._shares > 1:
                experts = experts.chunk(self._shares)[self._rank]
                counted = counted.chunk(self._shares)[self._rank]
        self._experts, self._counted = experts, counted

    def counts(self) -> Tensor:
        """[2] int64, of the last learning pass, on the host: how often this rank's routers alone would have chosen
        other experts than the engine, and how often their choice was given, over layers and tokens that predict a
        response's.
        """
        return self._counts.cpu()

    def _choose(self, place: int, replay: RouterReplay, router: nn.Module, _args: tuple[Tensor, ...]) -> None:
        waiting = self._again[router]
        if self._runs_again():
            experts = waiting.popleft()
        else:
            experts = self._experts
            if self._learning and self._recomputes:
                waiting.append(experts)
        if experts is None:
            replay.clear_router_replay_action()
            return
        replay.target_topk_idx = experts[:, :, place].flatten(0, 1).long()
        replay.set_router_replay_action(self._replay)

    def _runs_again(self) -> bool:
        """Whether routers run for the backward pass: only then are gradients on where activations are not kept."""
        return self._learning and self._recomputes and torch.is_grad_enabled()

    def _count(self, own: Callable[[], Tensor], taken: Tensor) -> None:
        if not self._learning or self._counted is None or self._runs_again():
            return
        other = (own().sort(dim=-1).values != taken.sort(dim=-1).values).any(dim=-1)
        found = torch.stack([(other & self._counted).sum(), self._counted.sum()])
        self._counts = self._counts.to(found.device) + found
