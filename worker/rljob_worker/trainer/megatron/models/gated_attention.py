"""Megatron's self-attention whose output is gated; imported where Megatron is."""

from __future__ import annotations

import torch
from megatron.core.transformer.attention import SelfAttention


class GatedSelfAttention(SelfAttention):
    """With the gate in plain operators: Megatron compiles it, which needs a compiler for the device."""

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """[S, B, heads * width] of the same, and a gate [S, B, heads, width]."""
        return (x * gate.reshape(x.shape).float().sigmoid()).to(x.dtype)
