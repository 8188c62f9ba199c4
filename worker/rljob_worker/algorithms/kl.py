"""Per-token estimators of the divergence from the reference policy."""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.spec import KlEstimator
from rljob_worker.algorithms.finite import bounded_ratio, propagate_non_finite

LOW_VAR_BOUND = 10.0
"""`low_var` is clamped to +-10 (slime's and verl's low_var_kl)."""
LOW_VAR_MAX_EXPONENT = 20.0
"""exp of more is far above the bound of 10; the clamp keeps the gradient 0 there instead of inf * 0."""


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
        log_ratio: [...] float32, log p - log p_old, differentiable; None for no correction.

    Returns:
        [...] float32 nats; NaN where an input is not finite, the clamp notwithstanding.
    """
    difference = log_probs - reference
    if estimator is KlEstimator.K1:
        estimate = difference
    elif estimator is KlEstimator.K2:
        estimate = difference.square() / 2
    elif estimator is KlEstimator.K3:
        estimate = torch.exp(-difference) - 1 + difference
    else:
        estimate = torch.exp((-difference).clamp(max=LOW_VAR_MAX_EXPONENT)) - 1 + difference
    if log_ratio is not None:
        estimate = propagate_non_finite(estimate * bounded_ratio(log_ratio), log_ratio)
    if estimator is KlEstimator.LOW_VAR:
        return propagate_non_finite(estimate.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND), difference)
    return estimate
