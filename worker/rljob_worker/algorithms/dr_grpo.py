"""Dr. GRPO: GRPO without its two normalisations (arXiv 2503.20783)."""

from __future__ import annotations

from rljob_worker.algorithms.grpo import grpo_advantages
from rljob_worker.algorithms.losses import ppo_clip
from rljob_worker.algorithms.registry import Algorithm, register

register(
    Algorithm(
        name="dr_grpo",
        min_group_size=2,
        aggregation="ConstantLength",
        without_effect=("sapo",),
        advantages=grpo_advantages,
        token_loss=ppo_clip,
    )
)
