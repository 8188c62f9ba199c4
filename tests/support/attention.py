"""Causal attention as its formula says."""

from __future__ import annotations

import torch


def by_formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: list[int], scale: float
) -> torch.Tensor:
    """softmax(scale * q k^T, masked) v, where a token sees those of its own sequence up to itself: [T, H, D]."""
    sequence = torch.bucketize(torch.arange(len(query)), torch.tensor(ends), right=True)
    hidden = (sequence[:, None] != sequence) | torch.ones(len(query), len(query)).bool().triu(1)
    repeats = query.shape[1] // key.shape[1]
    q, k, v = query.transpose(0, 1), *(t.repeat_interleave(repeats, 1).transpose(0, 1) for t in (key, value))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)
