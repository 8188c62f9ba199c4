"""Megatron's routers with given experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from rljob_worker.upstream.patch import MEGATRON, MEGATRON_BACKEND, Patch, Process, put

TopK = Callable[[Tensor, int, int | None, int | None], tuple[Tensor, Tensor]]
"""(scores [T, experts], how many, groups, groups of a token) -> (their scores, their numbers), [T, how many] each."""


class RouterReplay(Protocol):
    """Megatron's, of one router."""

    target_topk_idx: Tensor | None
    """[T, experts of a token] int64: the given experts."""

    def set_router_replay_action(self, router_replay_action: object) -> None:
        """Have it do something in place of choosing."""
        ...

    def clear_router_replay_action(self) -> None:
        """Have it choose."""
        ...

    @property
    def router_replay_action(self) -> object:
        """Action in place of choosing; None: it chooses."""
        ...

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: TopK
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers of the experts that are taken."""
        ...


def watch_choices(replay: RouterReplay, watcher: Callable[[Callable[[], Tensor], Tensor], None]) -> None:
    """Report the experts that a router would choose beside those that it is given, whenever it is given any.

    Args:
        replay: of the router.
        watcher: called with both, [T, experts of a token] int64 each; the first is computed when it is asked for.
    """
    told = replay.get_replay_topk

    def compare(
        scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: TopK
    ) -> tuple[Tensor, Tensor]:
        taken = told(scores, topk, num_groups, group_topk, default_compute_topk)
        if replay.router_replay_action is not None:
            watcher(lambda: default_compute_topk(scores.detach(), topk, num_groups, group_topk)[1], taken[1])
        return taken

    put(replay, get_replay_topk=compare)


PATCHES = (
    Patch(
        "megatron-router-choices",
        ("RouterReplay.get_replay_topk",),
        {"megatron-core": MEGATRON},
        "a router that is told its experts does not say which it would have chosen: how often engine and trainer "
        "differ (train/router_mismatch)",
        "tests/worker/trainer/test_trainer.py::test_each_token_goes_to_the_experts_that_the_batch_names",
        watch_choices,
        (Process.TRAINER,),
        backend=MEGATRON_BACKEND,
        scoped=True,
    ),
)
