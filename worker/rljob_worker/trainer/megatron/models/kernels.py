"""The modules with which Megatron's layers compute where torch's own kernels do."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F


class CausalAttention(torch.nn.Module):
    """Megatron's core attention on torch's fused kernel: causal, grouped queries, no mask, no dropout."""

    compute_dtype: ClassVar[torch.dtype | None] = None
    """In which the kernel computes; None for that of its inputs."""

    def __init__(self, config: object, softmax_scale: float | None = None, **_kwargs: object) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: object = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: object = None,
    ) -> torch.Tensor:
        """Context [S, B, H * D] of query [S, B, H, D], key and value [S, B, G, D]."""
        if any(given is not None for given in (attention_mask, attention_bias, packed_seq_params)):
            raise ValueError("causal attention takes no mask, bias or packing: pad batches on the right")
        return self._attend(query, key, value)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        context = F.scaled_dot_product_attention(
            self._heads_first(query),
            self._heads_first(key),
            self._heads_first(value),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return context.permute(2, 0, 1, 3).flatten(2).to(query.dtype)

    def _heads_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """[S, B, H, D] -> contiguous [B, H, S, D]."""
        dtype = self.compute_dtype or tensor.dtype
        return tensor.permute(1, 2, 0, 3).to(dtype, memory_format=torch.contiguous_format)


class CpuCausalAttention(CausalAttention):
    """On CPU the kernel's backward is twice as fast on contiguous inputs, and five times as fast in float32 as in
    bfloat16 where the processor has no bfloat16 arithmetic.
    """

    compute_dtype = torch.float32


class SwiGLU(torch.nn.Module):
    """Megatron's gated activation, silu(gate) * up of [..., 2 F] = gate beside up, in as few passes as torch allows.

    Megatron's own expression adds an offset of zero and joins the gradients of the two halves by a copy: on CPU that is
    2 % of a training step.
    """

    def __init__(self, config: object = None) -> None:
        super().__init__()

    def forward(self, gate_and_up: torch.Tensor) -> torch.Tensor:
        """[..., F] of [..., 2 F]."""
        out: torch.Tensor = _SwiGLUFunction.apply(gate_and_up)
        return out


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """torch's norm on a share of the positions; Megatron's wrapper of it refuses sequence parallelism.

    Each rank's gradient is of its own positions: Megatron adds up those of the weights that are marked.
    """

    def __init__(self, config: object, hidden_size: int, eps: float = 1e-5, **_kwargs: object) -> None:
        super().__init__(hidden_size, eps=eps)
        setattr(self.weight, "sequence_parallel", True)  # noqa: B010


class ZeroCenteredRMSNorm(torch.nn.Module):
    """A norm that scales by 1 + weight, in fp32, as the checkpoints of Qwen3.5 have it.

    Megatron's own, of another library, keeps the same weights.
    """

    def __init__(self, config: object, hidden_size: int, eps: float = 1e-5, **_kwargs: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of [..., hidden_size], in its dtype."""
        scale = self.weight.float() + 1
        return F.rms_norm(hidden.float(), scale.shape, scale, self.eps).to(hidden.dtype)


class _Context(Protocol):
    @property
    def saved_tensors(self) -> tuple[torch.Tensor, ...]: ...

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


class _SwiGLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, gate_and_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: _Context, grad: torch.Tensor) -> torch.Tensor:
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_and_up)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return result
