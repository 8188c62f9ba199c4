"""DAPO: GRPO with clip-higher and a token mean, on groups that carry a signal (arXiv 2503.14476).

Its dynamic sampling is `rollout.oversampling`, its overlong penalty the reward `overlong`.
"""

from __future__ import annotations

from rljob_worker.algorithms.grpo import grpo_advantages
from rljob_worker.algorithms.losses import ppo_clip
from rljob_worker.algorithms.registry import Algorithm, register

register(
    Algorithm(
        name="dapo",
        # Which asks for groups of two itself.
        requires_filter=True,
        clip_high=0.28,
        normalize_by_std=True,
        without_effect=("sapo",),
        advantages=grpo_advantages,
        token_loss=ppo_clip,
    )
)
