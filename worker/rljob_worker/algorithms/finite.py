"""Clamps that keep numbers in range, and faults visible through them."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""The log-ratio is clamped to +-20 before exp (verl `compute_policy_loss`), far outside any clip range."""


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio) [...], the log-ratio clamped to +-`MAX_LOG_RATIO`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def propagate_non_finite(values: Tensor, *sources: Tensor) -> Tensor:
    """`values` [...], with NaN wherever one of `sources` [...] is not finite.

    A clamp turns an infinite log-ratio into an ordinary number; a step must not be trained on it.
    """
    for source in sources:
        values = torch.where(source.isfinite(), values, torch.nan)
    return values
