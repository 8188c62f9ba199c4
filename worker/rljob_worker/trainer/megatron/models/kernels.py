"""The modules with which Megatron's layers compute where torch's own kernels do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rljob_worker.trainer.context_parallel import to_heads, to_tokens
from rljob_worker.trainer.packed_attention import attend_on_cpu, attend_on_cuda
from rljob_worker.trainer.shared_attention import attend_shared_on_cpu

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


class CausalAttention(torch.nn.Module):
    """Megatron's core attention on torch's fused kernels: causal, grouped queries, no mask, no dropout.

    Of a row of sequences, whose bounds `packed_seq_params` has, or of a batch of equal ones.

    Attributes:
        context_group: the ranks that divide each row; None where this one has whole rows.
    """

    context_group: dist.ProcessGroup | None = None

    def __init__(self, config: object, softmax_scale: float | None = None, **_kwargs: object) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    attend_on_device = staticmethod(attend_on_cuda)
    """Kernel of a device for a row [T, heads, width]."""
    shares_prompts = False
    """Whether it takes rows in which samples go on from one prompt."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Context [S, B, H * D] of query [S, B, H, D], key and value [S, B, G, D]; of a row, B is 1.

        Where a row is divided, S are this rank's tokens of it, and the bounds are the whole row's.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("causal attention takes no mask or bias: give the bounds of the row's sequences")
        if packed_seq_params is None:
            if self.context_group is not None:
                raise ValueError("ranks divide rows of samples, not batches: give the bounds of the row's sequences")
            return self._attend(query, key, value)
        if self.context_group is None:
            return self._attend_sequences(query, key, value, packed_seq_params)
        shares = [part.squeeze(1) for part in (query, key, value)]
        row = [part.unsqueeze(1) for part in to_heads(shares, self.context_group)]
        context = self._attend_sequences(row[0], row[1], row[2], packed_seq_params)
        heads = context.unflatten(2, (-1, value.shape[-1])).squeeze(1)
        return to_tokens(heads, self.context_group).flatten(1).unsqueeze(1)

    def _attend_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, packed_seq_params: PackedSeqParams
    ) -> Tensor:
        bounds, prefixes = packed_seq_params.cu_seqlens_q.tolist(), packed_seq_params.cu_seqlens_kv_padded
        if prefixes is not None:
            return self._attend_shared(query, key, value, bounds, prefixes.tolist())
        return self._attend_row(query, key, value, bounds)

    def _attend_row(self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> Tensor:
        row = (query.squeeze(1), key.squeeze(1), value.squeeze(1))
        return self.attend_on_device(*row, bounds, self._scale(query)).flatten(1).unsqueeze(1)

    def _attend_shared(
        self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int], prefixes: list[int]
    ) -> Tensor:
        raise ValueError(f"{type(self).__name__} takes no rows with shared prompts: give each sample its own")

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        context = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3).contiguous(),
            key.permute(1, 2, 0, 3).contiguous(),
            value.permute(1, 2, 0, 3).contiguous(),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return context.permute(2, 0, 1, 3).flatten(2)

    def _scale(self, query: Tensor) -> float:
        return float(query.shape[-1] ** -0.5) if self.softmax_scale is None else self.softmax_scale


class CpuCausalAttention(CausalAttention):
    """On CPU the kernel's backward is twice as fast on contiguous inputs, and five times as fast in float32 as in
    bfloat16 where the processor has no bfloat16 arithmetic.
    """

    shares_prompts = True

    def _attend_row(self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> Tensor:
        row = (query.squeeze(1).float(), key.squeeze(1).float(), value.squeeze(1).float())
        return attend_on_cpu(*row, bounds, self._scale(query)).flatten(1).unsqueeze(1).to(query.dtype)

    def _attend_shared(
        self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int], prefixes: list[int]
    ) -> Tensor:
        row = (query.squeeze(1).float(), key.squeeze(1).float(), value.squeeze(1).float())
        context = attend_shared_on_cpu(*row, bounds, prefixes, self._scale(query))
        return context.flatten(1).unsqueeze(1).to(query.dtype)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super()._attend(query.float(), key.float(), value.float()).to(query.dtype)


class SwiGLU(torch.nn.Module):
    """Megatron's gated activation, silu(gate) * up of [..., 2 F] = gate beside up, in as few passes as torch allows.

    Megatron's own expression adds an offset of zero and joins the gradients of the two halves by a copy: on CPU that is
    2 % of a training step.
    """

    def __init__(self, config: object = None) -> None:
        super().__init__()

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """[..., F] of [..., 2 F]."""
        out: Tensor = _SwiGLUFunction.apply(gate_and_up)
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

    def forward(self, hidden: Tensor) -> Tensor:
        """Norm of [..., hidden_size], in its dtype."""
        scale = self.weight.float() + 1
        return F.rms_norm(hidden.float(), scale.shape, scale, self.eps).to(hidden.dtype)


class _Context(Protocol):
    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _SwiGLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> Tensor:
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_and_up)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return result
