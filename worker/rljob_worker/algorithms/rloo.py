"""RLOO: the baseline of a sample is the mean of its group's others (arXiv 2402.14740)."""

from __future__ import annotations

from torch import Tensor

from rljob_api.spec import AlgorithmSpec
from rljob_worker.algorithms.advantages import group_advantages
from rljob_worker.algorithms.losses import ppo_clip
from rljob_worker.algorithms.registry import Algorithm, register


def leave_one_out_advantages(rewards: Tensor, _spec: AlgorithmSpec) -> Tensor:
    """Rewards [P, G] float32 -> r_g - mean of the G - 1 others [P, G] float32 (arXiv 2402.14740 eq. 8).

    Which is G / (G - 1) times the distance from the group's mean.
    """
    group = rewards.shape[1]
    return group_advantages(rewards, normalize_by_std=False) * (group / (group - 1))


register(
    Algorithm(
        name="rloo",
        min_group_size=2,
        without_effect=("normalize_by_std", "sapo"),
        advantages=leave_one_out_advantages,
        token_loss=ppo_clip,
    )
)
