"""Shaping of rewards before they become advantages, and of advantages before they are trained on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rljob_api.spec import AlgorithmSpec, RewardScope, RewardShapingSpec
from rljob_worker.algorithms.advantages import STD_EPSILON

WHITEN_EPSILON = 1e-8
"""Added to the variance (verl and ROLL `masked_whiten`)."""


def shape_rewards(rewards: Tensor, spec: RewardShapingSpec, batch: Tensor | None = None) -> Tensor:
    """(r - mean) / (std + 1e-6), each over the batch, the group or not at all, then clamped to [-clip, clip].

    ROLL's `reward_norm` (`norm_mean_type`, `norm_std_type`) and `reward_clip`. The standard deviation is the unbiased
    one; that of a single number is taken as 0.

    Args:
        rewards: [P, G] float32.
        spec: over what to normalise, and the bound.
        batch: [N] float32, all of the step, where `rewards` are a part of them.

    Returns:
        [P, G] float32.
    """
    shaped = exact = rewards.double()
    everything = exact if batch is None else batch.double()
    if spec.center is not None:
        shaped = exact - _over(exact, everything, spec.center, torch.Tensor.mean)
    if spec.scale is not None:
        shaped = shaped / (_over(exact, everything, spec.scale, _deviation) + STD_EPSILON)
    return (shaped if spec.clip is None else shaped.clamp(-spec.clip, spec.clip)).float()


def shape_advantages(advantages: Tensor, lengths: Tensor, spec: AlgorithmSpec) -> Tensor:
    """Whitened over the batch's response tokens, then clamped to [-advantage_clip, advantage_clip].

    A = (A - mean) / sqrt(variance + 1e-8), mean and unbiased variance over tokens, each of which has its response's
    advantage (verl and ROLL `masked_whiten`). With fewer than two tokens nothing is whitened (ROLL).

    Args:
        advantages: [...] float32, of each response.
        lengths: like them, int64: response tokens.
        spec: whether to whiten, and the bound.

    Returns:
        [...] float32.
    """
    shaped = advantages.double()
    tokens = lengths.double()
    count = tokens.sum()
    if spec.whiten_advantages and count >= 2:
        mean = (shaped * tokens).sum() / count
        variance = ((shaped - mean).square() * tokens).sum() / (count - 1)
        shaped = (shaped - mean) * (variance + WHITEN_EPSILON).rsqrt()
    bound = spec.advantage_clip
    return (shaped if bound is None else shaped.clamp(-bound, bound)).float()


def _over(values: Tensor, everything: Tensor, scope: RewardScope, function: Callable[..., Tensor]) -> Tensor:
    return function(everything) if scope is RewardScope.BATCH else function(values, dim=1, keepdim=True)


def _deviation(values: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    if (values.numel() if dim is None else values.shape[dim]) == 1:
        return torch.zeros(())
    return values.std() if dim is None else values.std(dim=dim, keepdim=keepdim)
