"""Per-token estimators of the divergence from the reference policy."""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.spec import KlEstimator
from rljob_worker.algorithms.finite import MAX_LOG_RATIO, bounded_ratio, propagate_non_finite

LOW_VAR_BOUND = 10.0
"""`low_var` is clamped to +-10 (slime's and verl's low_var_kl)."""
LOW_VAR_MAX_EXPONENT = 20.0
"""exp of more is far above the bound of 10; the clamp keeps the gradient 0 there instead of inf * 0."""
_MAX_POWER = 3 * MAX_LOG_RATIO
"""Likewise, where the power has a ratio in it, and what it is added to is up to exp(`MAX_LOG_RATIO`) times d."""


def kl_estimate(
    log_probs: Tensor, reference: Tensor, estimator: KlEstimator, log_ratio: Tensor | None = None
) -> Tensor:
    """Estimate of KL(policy || reference) from samples of the policy, with d = log p - log p_ref.

    k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d (Schulman, joschu.net/blog/kl-approx.html; k3 is the KL term of GRPO,
    arXiv 2402.03300 eq. 4); low_var = k3 clamped to [-10, 10] (slime `compute_approx_kl`, verl `low_var_kl`). With
    `log_ratio` the estimate is multiplied by exp(log_ratio) before the clamp: the tokens were sampled from the old
    policy, and only so are value and gradient those of the policy's own divergence (DeepSeek-V3.2, arXiv 2512.02556
    section 3.1).

    Args:
        log_probs: [...] float32, differentiable.
        reference: [...] float32, log-probabilities of the same tokens under the reference policy.
        estimator: which one.
        log_ratio: [...] float32, log p - log p_old, where log p_old is a constant; None for no correction.

    Returns:
        [...] float32 nats; NaN where an input is not finite, the clamp notwithstanding.
    """
    difference = log_probs - reference
    of_k3 = estimator in (KlEstimator.K3, KlEstimator.LOW_VAR)
    bounded = estimator is KlEstimator.LOW_VAR
    if of_k3 and log_ratio is not None:
        most = _MAX_POWER if bounded else None
        estimate = _unbiased_k3(log_probs, difference.detach(), log_ratio.detach(), most)
    else:
        if estimator is KlEstimator.K1:
            estimate = difference
        elif estimator is KlEstimator.K2:
            estimate = difference.square() / 2
        else:
            exponent = (-difference).clamp(max=LOW_VAR_MAX_EXPONENT) if bounded else -difference
            estimate = torch.exp(exponent) - 1 + difference
        if log_ratio is not None:
            estimate = propagate_non_finite(estimate * bounded_ratio(log_ratio), log_ratio)
    if bounded:
        return propagate_non_finite(estimate.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND), difference)
    return estimate


def _unbiased_k3(log_probs: Tensor, d: Tensor, log_ratio: Tensor, most: float | None) -> Tensor:
    """r (exp(-d) - 1 + d) with its gradient in closed form: r d, or r (1 - exp(-d)) where the clamp holds r.

    Autograd gets r d as r (1 - exp(-d)) + r (exp(-d) - 1 + d), of which fp32 keeps nothing where exp(-d) is above 2^24:
    17 nats from the reference.
    """
    ratio = bounded_ratio(log_ratio)
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    power = torch.exp((bounded - d).clamp(max=most) if most else bounded - d)
    value = propagate_non_finite(power + ratio * (d - 1), log_ratio)
    slope = torch.where(log_ratio == bounded, ratio * d, ratio - power)
    return value + slope * (log_probs - log_probs.detach())
