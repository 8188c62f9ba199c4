"""Truncated importance sampling between the engine's and the trainer's probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_worker.algorithms.finite import propagate_non_finite


def importance_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """w = clamp(exp(old - rollout), low, high), the factor of each token's policy loss.

    Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (fengyao.notion.site); slime
    `vanilla_tis_function`, whose bounds 0 and 2.0 are the defaults.

    Args:
        old_log_probs: [...] float32, the trainer's, of the policy that generated the tokens.
        rollout_log_probs: [...] float32, the engine's.
        low: lower bound.
        high: upper bound.

    Returns:
        (weights, ratio), both [...] float32 without gradient; `ratio` is before the clamp. Where a log-probability is
        not finite the weight is NaN.

    Raises:
        ValueError: `low` above `high`.
    """
    if low > high:
        raise ValueError(f"algorithm.tis.low: {low} is above algorithm.tis.high {high}")
    difference = (old_log_probs - rollout_log_probs).detach()
    ratio = torch.exp(difference)
    return propagate_non_finite(ratio.clamp(low, high), difference), ratio
