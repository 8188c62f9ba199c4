"""GRPO: group-relative advantages with PPO's clipped loss (arXiv 2402.03300)."""

from __future__ import annotations

from torch import Tensor

from rljob_api.spec import AlgorithmSpec
from rljob_worker.algorithms.advantages import group_advantages
from rljob_worker.algorithms.losses import ppo_clip
from rljob_worker.algorithms.registry import Algorithm, register


def grpo_advantages(rewards: Tensor, spec: AlgorithmSpec) -> Tensor:
    """Rewards [P, G] float32 -> advantages [P, G] float32, by `spec.normalize_by_std`."""
    return group_advantages(rewards, spec.normalize_by_std)


register(
    Algorithm(
        name="grpo",
        min_group_size=2,
        clip_high=0.28,
        normalize_by_std=True,
        without_effect=("sapo",),
        advantages=grpo_advantages,
        token_loss=ppo_clip,
    )
)
