"""REINFORCE++ and its variant with a baseline: normalised over the batch instead of the group (arXiv 2501.03262)."""

from __future__ import annotations

from rljob_worker.algorithms.grpo import grpo_advantages
from rljob_worker.algorithms.losses import ppo_clip
from rljob_worker.algorithms.registry import Algorithm, register
from rljob_worker.algorithms.reinforce import reward_as_advantage

for _name, _least, _advantages in (
    ("reinforce_pp", 1, reward_as_advantage),
    ("reinforce_pp_baseline", 2, grpo_advantages),
):
    register(
        Algorithm(
            name=_name,
            min_group_size=_least,
            whiten_advantages=True,
            without_effect=("normalize_by_std", "sapo"),
            advantages=_advantages,
            token_loss=ppo_clip,
        )
    )
