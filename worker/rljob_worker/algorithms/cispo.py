"""CISPO: the ratio is a clipped weight, and no token loses its gradient (arXiv 2506.13585)."""

from __future__ import annotations

from torch import Tensor

from rljob_api.spec import AlgorithmSpec
from rljob_worker.algorithms.finite import bounded_ratio, propagate_non_finite
from rljob_worker.algorithms.grpo import grpo_advantages
from rljob_worker.algorithms.losses import PolicyTokens
from rljob_worker.algorithms.registry import Algorithm, register


def clipped_weight(tokens: PolicyTokens, spec: AlgorithmSpec) -> tuple[Tensor, Tensor]:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] A log p (MiniMax-M1, arXiv 2506.13585 eq. 4 and 5). A `TokenLoss`."""
    ratio = bounded_ratio(tokens.log_ratio.detach())
    weight = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    loss = -weight * tokens.advantages * tokens.log_probs
    return propagate_non_finite(loss, tokens.log_ratio), weight != ratio


register(
    Algorithm(
        name="cispo",
        min_group_size=2,
        # No lower bound (arXiv 2506.13585); the upper one at 5 (arXiv 2510.13786 found 4 to 8 alike).
        clip_low=1.0,
        clip_high=4.0,
        normalize_by_std=True,
        without_effect=("dual_clip", "sapo"),
        advantages=grpo_advantages,
        token_loss=clipped_weight,
    )
)
