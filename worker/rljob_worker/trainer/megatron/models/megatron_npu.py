"""The modules with which Megatron's layers compute on Ascend NPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_worker.trainer.megatron.models.kernels import CausalAttention
from rljob_worker.trainer.packed_attention import attend_on_npu


class FusionAttention(CausalAttention):
    """On CANN's fused kernel; the size of a head is a multiple of 16."""

    attend_on_device = staticmethod(attend_on_npu)


class FusedSwiGLU(torch.nn.Module):
    """Megatron's gated activation, silu(gate) * up of [..., 2 F] = gate beside up, on CANN's fused kernel."""

    def __init__(self, config: object = None) -> None:
        super().__init__()

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """[..., F] of [..., 2 F]."""
        import torch_npu

        out: Tensor = torch_npu.npu_swiglu(gate_and_up, dim=-1)
        return out
