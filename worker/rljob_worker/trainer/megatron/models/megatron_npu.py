"""The modules with which Megatron's layers compute on Ascend NPUs."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from rljob_worker.trainer.megatron.models.kernels import CausalAttention

_CAUSAL = 2
"""sparse_mode `leftUpCausal`: the mask is given once, as the upper triangle of 2048 x 2048, whatever the length is."""
_MASK_SIZE = 2048


class FusionAttention(CausalAttention):
    """On CANN's fused kernel; the size of a head is a multiple of 16."""

    def _attend_row(self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> Tensor:
        import torch_npu

        # In layout TND the causal mask is each sequence's own; both lists are integers of the host.
        ends = bounds[1:]
        context: Tensor = torch_npu.npu_fusion_attention(
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            query.shape[2],
            "TND",
            atten_mask=_upper_triangle(query.device),
            scale=self._scale(query),
            keep_prob=1.0,
            sparse_mode=_CAUSAL,
            actual_seq_qlen=ends,
            actual_seq_kvlen=ends,
        )[0]
        return context.flatten(1).unsqueeze(1)


@cache
def _upper_triangle(device: torch.device) -> Tensor:
    """Bool [2048, 2048], True where a query must not look: what `sparse_mode` 2 takes at any sequence length."""
    return torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool, device=device).triu_(1)


class FusedSwiGLU(torch.nn.Module):
    """Megatron's gated activation, silu(gate) * up of [..., 2 F] = gate beside up, on CANN's fused kernel."""

    def __init__(self, config: object = None) -> None:
        super().__init__()

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """[..., F] of [..., 2 F]."""
        import torch_npu

        out: Tensor = torch_npu.npu_swiglu(gate_and_up, dim=-1)
        return out
