"""Sums and means over whole responses, at each of their tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sequences:
    """Grouping of a micro-batch's tokens into responses. A response lies whole in one micro-batch.

    Attributes:
        mask: [B, S] or [T] bool, response tokens.
        index: [T] int64, the response that each packed token belongs to, below T; None where rows are responses.
    """

    mask: Tensor
    index: Tensor | None = None

    def total(self, values: Tensor) -> Tensor:
        """Sum of each response's values, at each of its tokens.

        Args:
            values: like the mask, 0 outside it.

        Returns:
            As `values`; at places outside the mask their row's sum.

        Raises:
            ValueError: packed tokens without an index.
        """
        if self.index is not None:
            # As many places as tokens are always enough, and to count the responses would wait for the device.
            return torch.zeros_like(values).index_add(0, self.index, values)[self.index]
        if self.mask.dim() != 2:
            raise ValueError("packed tokens: which response each belongs to is not known")
        return values.sum(dim=1, keepdim=True).expand_as(values)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over each response's tokens, at each of them; arguments and errors as of `total`."""
        return self.total(values) / self.total(self.mask.to(values.dtype)).clamp(min=1)
