"""Keeping faults visible through clamps."""

from __future__ import annotations

import torch
from torch import Tensor


def propagate_non_finite(values: Tensor, *sources: Tensor) -> Tensor:
    """`values` [...], with NaN wherever one of `sources` [...] is not finite.

    A clamp turns an infinite log-ratio into an ordinary number; a step must not be trained on it.
    """
    for source in sources:
        values = torch.where(source.isfinite(), values, torch.nan)
    return values
