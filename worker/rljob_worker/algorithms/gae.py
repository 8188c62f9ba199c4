"""Advantages and returns of tokens from a critic's values: generalized advantage estimation (arXiv 1506.02438)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Estimates:
    """Numbers for the sampled tokens of some streams, one stream after the other; [n] float32 each."""

    advantages: Tensor
    returns: Tensor
    """The numbers that the critic is to predict before each token."""


def outcome_rewards(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Each stream's reward at its last sampled token, 0 at the others (TRL and verl: outcome rewards).

    Args:
        rewards: [N] float32.
        lengths: [N] int64, sampled tokens of each stream; the reward of one without any is lost.

    Returns:
        [n] float32, n the sum of the lengths.
    """
    tokens = rewards.new_zeros(int(lengths.sum()))
    some = lengths > 0
    tokens[lengths.cumsum(0)[some] - 1] = rewards[some]
    return tokens


def generalized_advantages(rewards: Tensor, values: Tensor, lengths: Tensor, *, gamma: float, lam: float) -> Estimates:
    """A_t = sum over l of (gamma lambda)^l delta_{t+l}, delta_t = r_t + gamma V(s_{t+1}) - V(s_t); returns A + V.

    arXiv 1506.02438 eq. 11 and 16; verl `compute_gae_advantage_return` and TRL's PPO trainer, without their whitening.
    After a stream's last sampled token V is 0: a response that was cut off gets no more than its reward. Between the
    turns of an episode stand observations, which are no tokens of the policy: the next sampled token follows.

    Args:
        rewards: [n] float32, of each sampled token, one stream after the other.
        values: [n] float32, V(s_t), of the tokens before each sampled one.
        lengths: [N] int64, sampled tokens of each stream.
        gamma: discount by token.
        lam: lambda; 1: the rewards that follow alone, 0: the next value alone.

    Returns:
        Float32, computed in float64.
    """
    inside = torch.arange(max(1, int(lengths.max()))) < lengths[:, None]
    table = torch.zeros(inside.shape, dtype=torch.float64)
    known = table.masked_scatter(inside, values.double())
    # Places after a stream's end are 0 and add nothing.
    deltas = table.masked_scatter(inside, rewards.double()) + gamma * F.pad(known[:, 1:], (0, 1)) - known
    advantages = torch.empty_like(deltas)
    following = torch.zeros(len(lengths), dtype=torch.float64)
    for place in reversed(range(deltas.shape[1])):
        following = deltas[:, place] + gamma * lam * following
        advantages[:, place] = following
    return Estimates(advantages[inside].float(), (advantages + known)[inside].float())


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - var(returns - values) / var(returns): 1 where values are the returns, 0 where they are no better than a mean.

    Over tokens [n], in float64; NaN where the returns are all alike.
    """
    exact = returns.double()
    variance = float(exact.var(correction=0)) if len(exact) else 0.0
    if variance == 0:
        return math.nan
    return 1 - float((exact - values.double()).var(correction=0)) / variance
