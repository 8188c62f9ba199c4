"""PPO with a critic: advantages of tokens by generalized advantage estimation (arXiv 1707.06347)."""

from __future__ import annotations

from rljob_worker.algorithms.losses import ppo_clip
from rljob_worker.algorithms.registry import Algorithm, register
from rljob_worker.algorithms.reinforce import reward_as_advantage

register(
    Algorithm(
        name="ppo",
        needs_critic=True,
        whiten_advantages=True,
        without_effect=("normalize_by_std", "sapo"),
        advantages=reward_as_advantage,
        token_loss=ppo_clip,
    )
)
