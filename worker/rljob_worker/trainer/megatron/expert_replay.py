"""Routing by the engine's choice of experts, on the routers of Megatron's model (R3, arXiv 2510.11370)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from rljob_worker.parallel_layout import ParallelLayout


class ExpertReplay:
    """Tells this rank's routers, before each runs, which experts its tokens go to; the weights of the experts are still
    the router's, and learned.

    Megatron's own `RouterReplay` keeps one choice a router. Here a router that runs a second time, when activations are
    recomputed, gets that of the micro-batch whose turn it is: with pipeline stages others ran since.

    Args:
        model: with `moe_enable_routing_replay`.
        moe_layers: whether each layer of the whole model has experts.
        layout: where this rank is.
        recomputes: whether routers run again in the backward pass.
    """

    def __init__(
        self, model: nn.Module, moe_layers: Sequence[bool], layout: ParallelLayout, *, recomputes: bool
    ) -> None:
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        self._rank, self._shares = (layout.tp_rank, layout.tp)
        self._recomputes = recomputes
        self._learning = False
        self._experts: Tensor | None = None
        self._again: dict[nn.Module, deque[Tensor | None]] = {}
        self._replay = RouterReplayAction.REPLAY_FORWARD
        for router in model.modules():
            if isinstance(router, TopKRouter):
                assert router.layer_number is not None
                self._again[router] = deque()
                place = sum(moe_layers[: router.layer_number - 1])
                router.register_forward_pre_hook(partial(self._choose, place))

    def begin_pass(self, *, learning: bool) -> None:
        """A forward pass begins, with a backward pass where it is `learning`; what an earlier one left is dropped."""
        self._learning = learning
        for waiting in self._again.values():
            waiting.clear()

    def use(self, experts: Tensor | None) -> None:
        """Of the micro-batch that is computed next: [S, b, layers with experts, experts of a token].

        None: the routers choose. With sequence parallelism each tensor-parallel rank has its share of S, which is a
        multiple of their number.
        """
        if experts is not None and self._shares > 1:
            experts = experts.chunk(self._shares)[self._rank]
        self._experts = experts

    def _choose(self, place: int, router: nn.Module, _args: tuple[Tensor, ...]) -> None:
        waiting = self._again[router]
        if self._learning and self._recomputes and torch.is_grad_enabled():
            experts = waiting.popleft()
        else:
            experts = self._experts
            if self._learning and self._recomputes:
                waiting.append(experts)
        replay = router.router_replay
        if experts is None:
            replay.clear_router_replay_action()
            return
        replay.target_topk_idx = experts[:, :, place].flatten(0, 1).long()
        replay.set_router_replay_action(self._replay)
