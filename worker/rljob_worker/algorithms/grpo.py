"""GRPO: group-relative advantages with PPO's clipped loss (arXiv 2402.03300)."""

from __future__ import annotations

from torch import Tensor

from rljob_api.spec import AlgorithmSpec
from rljob_worker.algorithms.advantages import group_advantages
from rljob_worker.algorithms.losses import policy_gradient_loss
from rljob_worker.algorithms.spec import Algorithm, register


def grpo_advantages(rewards: Tensor, spec: AlgorithmSpec) -> Tensor:
    """Rewards [P, G] float32 -> advantages [P, G] float32, by `spec.normalize_by_std`."""
    return group_advantages(rewards, spec.normalize_by_std)


GRPO = register(Algorithm(name="grpo", advantages=grpo_advantages, policy_loss=policy_gradient_loss))
