"""Policy-gradient losses on the tokens of one micro-batch.

Everything is a sum over tokens with weights whose denominators are those of the whole batch, so that the values of all
micro-batches and data-parallel ranks add up to the value of the batch, however it was split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_api.spec import AlgorithmSpec, LossAggregation
from rljob_api.spec.algorithm import Divergence, RatioAnchor
from rljob_worker.algorithms.finite import bounded_ratio, propagate_non_finite
from rljob_worker.algorithms.kl import kl_estimate
from rljob_worker.algorithms.mismatch import finish_ages, mismatch_metrics
from rljob_worker.algorithms.sequences import Sequences
from rljob_worker.algorithms.tis import importance_weights

MAX_METRICS = ("train_rollout_logprob_abs_diff_max",)
"""Metrics reduced by maximum over micro-batches and ranks; all others by sum."""
TOKEN_MEANS = (
    "ppo_kl",
    "pg_clipfrac",
    "tis",
    "tis_clipfrac",
    "train_rollout_logprob_abs_diff",
    "mismatch_kl",
    "off_policy_masked",
    "teacher_kl",
)
"""Metrics that are token sums, to be divided by the summed `tokens`."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One micro-batch. Tokens are [B, S] with a mask, or packed [T]; all tensors of a field's shape are alike."""

    log_probs: Tensor
    """[B, S] float32, of the policy being trained, differentiable."""
    advantages: Tensor
    """[B, S] or [B] float32."""
    mask: Tensor
    """[B, S] bool: response tokens. Values elsewhere are ignored, whatever they are."""
    weights: Tensor
    """[B, S] float32 from `token_weights`: the weight of each token in the aggregated loss."""
    old_log_probs: Tensor | None = None
    """[B, S] float32, the trainer's, before the step's first update; None: `log_probs` are the old ones."""
    rollout_log_probs: Tensor | None = None
    """[B, S] float32, the engine's."""
    reference_log_probs: Tensor | None = None
    """[B, S] float32, the reference policy's; required where the KL is in the loss."""
    teacher_log_probs: Tensor | None = None
    """[B, S] float32, the teacher's; required where the policy learns from it by sampled tokens."""
    divergence: Tensor | None = None
    """[B, S] float32, differentiable, from the teacher; required where the policy learns from its likeliest tokens."""
    entropy: Tensor | None = None
    """[B, S] float32; required where the entropy bonus is in the loss, and then differentiable."""
    sequences: Tensor | None = None
    """[T] int64, for packed tokens: the response that each belongs to; required where a term is per response."""


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """Arguments of a policy loss. All are like `LossInputs.log_probs`, and 0 outside the mask."""

    log_probs: Tensor
    """Differentiable."""
    log_ratio: Tensor
    """log p_new - log p_old, differentiable; with `anchor` Rollout from the engine's."""
    advantages: Tensor
    sequences: Sequences


TokenLoss = Callable[[PolicyTokens, AlgorithmSpec], tuple[Tensor, Tensor]]
"""An algorithm's own part: (loss of each token, differentiable and NaN where the log-ratio is not finite; which tokens
the clip decided, bool); both like `PolicyTokens.log_probs`."""


def token_weights(
    mask: Tensor,
    mode: LossAggregation,
    *,
    num_tokens: int | Tensor,
    num_sequences: int | Tensor,
    constant_length: int,
) -> Tensor:
    """Weight of each token such that the aggregated loss is the weighted sum.

    TokenMean: 1 / N_tokens (DAPO, arXiv 2503.14476 eq. 8); SequenceMean: 1 / (N_sequences |o_i|) (GRPO, arXiv
    2402.03300 eq. 3); ConstantLength: 1 / (N_sequences L) (Dr. GRPO, arXiv 2503.20783, L being the longest response
    allowed).

    Args:
        mask: [B, S] bool, response tokens; each row is one whole response.
        mode: how tokens become one number.
        num_tokens: response tokens of the whole optimizer update, over all micro-batches and data-parallel ranks.
        num_sequences: sequences of the whole optimizer update.
        constant_length: L, `rollout.maxResponseTokens`.

    Returns:
        [B, S] float32, 0 outside the mask.
    """
    weights = mask.float()
    if mode is LossAggregation.TOKEN_MEAN:
        return weights / num_tokens
    if mode is LossAggregation.SEQUENCE_MEAN:
        return weights / (weights.sum(dim=1, keepdim=True).clamp(min=1) * num_sequences)
    return weights / (constant_length * num_sequences)


def clipped_policy_loss(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective, negated, per token.

    With r = exp(log_ratio): max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv 1707.06347 eq. 7; separate
    bounds: DAPO, arXiv 2503.14476 eq. 8); with `dual_clip` c and A < 0, at most -c A (arXiv 1912.09729).

    Args:
        log_ratio: [...] float32, log p_new - log p_old, differentiable.
        advantages: [...] float32, broadcastable to it.
        clip_low: distance of the lower bound from 1.
        clip_high: distance of the upper bound from 1.
        dual_clip: c > 1, or None for none.

    Returns:
        (loss, clipped), both [...]: the loss, NaN where the log-ratio is not finite, and whether the clip to
        [1 - clip_low, 1 + clip_high] decided it (bool).
    """
    ratio = bounded_ratio(log_ratio)
    unclipped = -ratio * advantages
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = torch.maximum(unclipped, bounded)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return propagate_non_finite(loss, log_ratio), bounded > unclipped


def ppo_clip(tokens: PolicyTokens, spec: AlgorithmSpec) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss: the `TokenLoss` of all algorithms that differ by their advantages."""
    return clipped_policy_loss(tokens.log_ratio, tokens.advantages, spec.clip_low, spec.clip_high, spec.dual_clip)


def off_policy_weights(tokens: PolicyTokens, delta: float) -> Tensor:
    """0 on responses with a negative advantage that the policy has moved away from, 1 elsewhere.

    Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556 section 3.1; slime `compute_opsm_mask`): a response
    counts as left behind where the mean over its tokens of log p_old - log p_new is above `delta`.

    Returns:
        Like `tokens.log_probs`, float32 without gradient.
    """
    distance = -tokens.sequences.mean(tokens.log_ratio.detach())
    return ((tokens.advantages >= 0) | (distance <= delta)).to(distance.dtype)


def _zero_outside(mask: Tensor, values: Tensor | None) -> Tensor | None:
    return None if values is None else torch.where(mask, values, 0.0)


def _from_teacher(inputs: LossInputs, spec: AlgorithmSpec, old: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """log p_old - log q of sampled tokens, or the divergence; both 0 outside the mask, None where it is not asked for.

    The first is the KL's estimate on samples of the old policy. As a reward its gradient is the KL's: that of
    sum_v p_v (log p_v - log q_v) is E[(log p - log q) d log p].
    """
    if spec.distill is None:
        return None, None
    by_tokens = spec.distill.divergence is Divergence.TOP_K
    given = inputs.divergence if by_tokens else inputs.teacher_log_probs
    if given is None:
        raise ValueError("algorithm.distill: needs what the teacher says of the same tokens")
    if by_tokens:
        return None, torch.where(inputs.mask, given, 0.0)
    return torch.where(inputs.mask, old - given, 0.0), None


def policy_gradient_loss(
    inputs: LossInputs, spec: AlgorithmSpec, token_loss: TokenLoss = ppo_clip
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's share of the loss: sum_t w_t (m_t tis_t L_t - c_entropy H_t + c_kl KL_t).

    With `anchor` Rollout the log-ratio is log p_new - log p_rollout, and tis_t is 1. With `distill` the advantages of
    rewards have its weight; c (log q_t - log p_old_t) is added to them with divergence Sampled, and c w_t D_t to the
    loss with TopK (`divergence`), where c is its coefficient and q the teacher.

    Args:
        inputs: the micro-batch.
        spec: clip range, KL, entropy bonus, TIS and masks.
        token_loss: L, the algorithm's own part.

    Returns:
        (loss, metrics): 0-dim float32, the loss differentiable. The metrics carry no gradient and are reduced over
        micro-batches and data-parallel ranks by maximum (`MAX_METRICS`) or sum (all others), then go through
        `finish_metrics`. `loss`, `pg_loss`, `entropy_loss` and `kl_loss` are weighted sums as the loss itself is;
        `tokens` counts response tokens; `TOKEN_MEANS` are sums over them. A log-probability that is not finite makes
        the loss NaN.

    Raises:
        ValueError: a term is in the loss but its input is missing.
    """
    mask, weights = inputs.mask, inputs.weights
    if spec.kl.coefficient > 0 and inputs.reference_log_probs is None:
        raise ValueError("algorithm.kl.coefficient: above 0 needs the reference policy's log-probabilities")
    entropy_in_graph = inputs.entropy is not None and (inputs.entropy.requires_grad or not torch.is_grad_enabled())
    if spec.entropy_coefficient > 0 and not entropy_in_graph:
        raise ValueError("algorithm.entropyCoefficient: above 0 needs a differentiable entropy")
    anchored = spec.anchor is RatioAnchor.ROLLOUT
    for field, needed in (("tis.enabled", spec.tis.enabled), ("anchor: Rollout", anchored)):
        if needed and inputs.rollout_log_probs is None:
            raise ValueError(f"algorithm.{field}: needs the engine's log-probabilities")
    log_probs = torch.where(mask, inputs.log_probs, 0.0)
    old = _zero_outside(mask, inputs.old_log_probs)
    old = log_probs.detach() if old is None else old
    rollout = _zero_outside(mask, inputs.rollout_log_probs)
    reference = _zero_outside(mask, inputs.reference_log_probs)
    advantages = inputs.advantages
    if advantages.dim() < log_probs.dim():
        advantages = advantages.unsqueeze(-1)
    advantages = torch.where(mask, advantages, 0.0)
    gap, divergence = _from_teacher(inputs, spec, old)
    if spec.distill is not None:
        advantages = spec.distill.reward_weight * advantages
        if gap is not None:
            advantages = advantages - spec.distill.coefficient * gap

    log_ratio = log_probs - (rollout if anchored and rollout is not None else old)
    tokens = PolicyTokens(log_probs, log_ratio, advantages, Sequences(mask, inputs.sequences))
    token_losses, clipped = token_loss(tokens, spec)
    metrics = {"tokens": mask.sum().float(), "ppo_kl": -log_ratio.sum(), "pg_clipfrac": (clipped & mask).sum().float()}
    if rollout is not None:
        metrics |= mismatch_metrics(old, rollout)
    if spec.tis.enabled and rollout is not None and not anchored:
        tis, ratio = importance_weights(old, rollout, spec.tis, tokens.sequences)
        token_losses = token_losses * tis
        metrics |= {"tis": torch.where(mask, ratio, 0.0).sum(), "tis_clipfrac": ((tis != ratio) & mask).sum().float()}
    if spec.off_policy_mask is not None:
        kept = off_policy_weights(tokens, spec.off_policy_mask.delta)
        token_losses = token_losses * kept
        metrics["off_policy_masked"] = ((kept == 0) & mask).sum().float()
    pg_loss = (token_losses * weights).sum()
    loss = pg_loss
    metrics["pg_loss"] = pg_loss
    if inputs.entropy is not None:
        metrics["entropy_loss"] = (torch.where(mask, inputs.entropy, 0.0) * weights).sum()
        if spec.entropy_coefficient > 0:
            loss = loss - spec.entropy_coefficient * metrics["entropy_loss"]
    if reference is not None:
        ratio_of_kl = log_ratio if spec.kl.unbiased else None
        metrics["kl_loss"] = (kl_estimate(log_probs, reference, spec.kl.estimator, ratio_of_kl) * weights).sum()
        if spec.kl.coefficient > 0:
            loss = loss + spec.kl.coefficient * metrics["kl_loss"]
    if divergence is not None and spec.distill is not None:
        loss = loss + spec.distill.coefficient * (divergence * weights).sum()
    distance = gap if divergence is None else divergence
    if distance is not None:
        metrics["teacher_kl"] = distance.sum()
    metrics["loss"] = loss
    return loss, {name: value.detach() for name, value in metrics.items()}


def finish_metrics(reduced: dict[str, float]) -> dict[str, float]:
    """Reduced metrics of a batch -> what is reported: token sums become means and every name gets `train/` in front."""
    tokens = reduced["tokens"]
    return {
        f"train/{name}": value / tokens if name in TOKEN_MEANS and tokens > 0 else value
        for name, value in finish_ages(reduced).items()
        if name != "tokens"
    }
