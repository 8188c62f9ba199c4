"""REINFORCE: the reward itself is the advantage; no group, no critic."""

from __future__ import annotations

from torch import Tensor

from rljob_api.spec import AlgorithmSpec
from rljob_worker.algorithms.losses import ppo_clip
from rljob_worker.algorithms.registry import Algorithm, register


def reward_as_advantage(rewards: Tensor, _spec: AlgorithmSpec) -> Tensor:
    """Rewards [P, G] float32 -> the same: the return of every token of an outcome reward without discount.

    ROLL's `adv_estimator: reinforce` (`compute_reinforce_return` with gamma 1), whose loss is PPO's clip as well. What
    makes it useful are `algorithm.rewards` and `algorithm.whitenAdvantages`.
    """
    return rewards.clone()


register(
    Algorithm(
        name="reinforce",
        without_effect=("normalize_by_std", "sapo"),
        advantages=reward_as_advantage,
        token_loss=ppo_clip,
    )
)
