"""On-policy distillation: reverse KL from a teacher on the policy's own samples (GKD, arXiv 2306.13649)."""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.spec import AlgorithmSpec
from rljob_worker.algorithms.advantages import group_advantages
from rljob_worker.algorithms.losses import ppo_clip
from rljob_worker.algorithms.registry import Algorithm, register


def reward_advantages(rewards: Tensor, spec: AlgorithmSpec) -> Tensor:
    """Rewards [P, G] float32 -> GRPO's advantages [P, G] float32, not weighted; zeros where rewards have no weight."""
    if spec.distill is None or spec.distill.reward_weight == 0:
        return torch.zeros_like(rewards)
    return group_advantages(rewards, spec.normalize_by_std)


register(
    Algorithm(
        name="distill",
        needs_teacher=True,
        clip_high=0.28,
        normalize_by_std=True,
        without_effect=("sapo",),
        advantages=reward_advantages,
        token_loss=ppo_clip,
    )
)
