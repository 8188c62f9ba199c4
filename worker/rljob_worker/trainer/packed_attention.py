"""Causal attention over a row of sequences, each of which sees itself alone; on CPU, CUDA and NPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Run:
    """Sequences of one length that lie side by side in a row: a rectangle, which a kernel takes at once."""

    start: int
    """Place in the row where the first one begins."""
    count: int
    length: int

    def by_head(self, row: Tensor) -> Tensor:
        """View [count, heads, length, D] of a row [T, heads, D]."""
        part = row[self.start : self.start + self.count * self.length]
        return part.unflatten(0, (self.count, self.length)).transpose(1, 2)

    def inputs(self, *rows: Tensor) -> list[Tensor]:
        """The same of several, contiguous: so kernels for CPUs are fastest."""
        return [self.by_head(row).contiguous() for row in rows]


def runs(bounds: Sequence[int]) -> Iterator[Run]:
    """The runs of a row.

    Args:
        bounds: [b + 1], where each sequence begins; the last is T.
    """
    start = 0
    for length, group in groupby(end - begin for begin, end in pairwise(bounds)):
        count = len(list(group))
        yield Run(start, count, length)
        start += count * length


def attend_on_cpu(query: Tensor, key: Tensor, value: Tensor, bounds: Sequence[int], scale: float) -> Tensor:
    """Context of a row on torch's flash kernel for CPUs, run by run, under one node of autograd.

    Args:
        query: [T, H, D] float32, float64 or bfloat16.
        key: [T, G, D], where G divides H.
        value: the same.
        bounds: [b + 1], where each sequence begins; the last is T.
        scale: of the scores.

    Returns:
        [T, H, D], contiguous.
    """
    parts = tuple(runs(bounds))
    if len(parts) == 1:
        return _by_fused_kernel(parts[0], query, key, value, scale)
    context: Tensor = _AttentionOfRuns.apply(query, key, value, parts, scale)
    return context


def attend_on_cuda(query: Tensor, key: Tensor, value: Tensor, bounds: Sequence[int], scale: float) -> Tensor:
    """The same on CUDA: torch's kernel for sequences of many lengths, which takes 16 bits a number; else run by run."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        return torch.cat([_by_fused_kernel(run, query, key, value, scale) for run in runs(bounds)])
    from torch.nn.attention.varlen import varlen_attn

    starts = torch.tensor(bounds, dtype=torch.int32).to(query.device, non_blocking=True)
    longest = max(end - begin for begin, end in pairwise(bounds))
    repeats = query.shape[1] // key.shape[1]
    # By its documentation it has as many key heads as query heads. A window of (-1, 0) is the causal mask.
    context = varlen_attn(
        query,
        key.repeat_interleave(repeats, 1),
        value.repeat_interleave(repeats, 1),
        starts,
        starts,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0),
    )
    assert isinstance(context, Tensor)
    return context


_CAUSAL = 2
"""sparse_mode `leftUpCausal`: the mask is given once, as the upper triangle of 2048 x 2048, whatever the length is."""
_MASK_SIZE = 2048


def attend_on_npu(query: Tensor, key: Tensor, value: Tensor, bounds: Sequence[int], scale: float) -> Tensor:
    """The same on CANN's fused kernel; the size of a head is a multiple of 16."""
    import torch_npu

    # In layout TND the causal mask is each sequence's own; both lists are integers of the host.
    ends = list(bounds[1:])
    context: Tensor = torch_npu.npu_fusion_attention(
        query,
        key,
        value,
        query.shape[1],
        "TND",
        atten_mask=_upper_triangle(query.device),
        scale=scale,
        keep_prob=1.0,
        sparse_mode=_CAUSAL,
        actual_seq_qlen=ends,
        actual_seq_kvlen=ends,
    )[0]
    return context


@cache
def _upper_triangle(device: torch.device) -> Tensor:
    """Bool [2048, 2048], True where a query must not look: what `sparse_mode` 2 takes at any sequence length."""
    return torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool, device=device).triu_(1)


def _by_fused_kernel(run: Run, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[tokens of the run, H, D]."""
    query, key, value = run.inputs(query, key, value)
    context = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return context.transpose(1, 2).flatten(0, 1)


class _Context(Protocol):
    runs: tuple[Run, ...]
    scale: float

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...


flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class _AttentionOfRuns(torch.autograd.Function):
    """The kernel computes each run on its own; what it made is written into place, with neither a view of autograd's
    nor a joined copy for each.
    """

    @staticmethod
    def forward(
        ctx: _Context, query: Tensor, key: Tensor, value: Tensor, parts: tuple[Run, ...], scale: float
    ) -> Tensor:
        context = torch.empty_like(query, memory_format=torch.contiguous_format)
        kept = []
        for run in parts:
            inputs = run.inputs(query, key, value)
            made, log_sum_exp = flash(*inputs, 0.0, True, scale=scale)
            run.by_head(context).copy_(made)
            kept += [*inputs, log_sum_exp]
        ctx.save_for_backward(context, *kept)
        ctx.runs, ctx.scale = parts, scale
        return context

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        context, *kept = ctx.saved_tensors
        heads = (context.shape[1], kept[1].shape[1], kept[2].shape[1])
        grads = [context.new_empty(len(context), count, context.shape[2]) for count in heads]
        for number, run in enumerate(ctx.runs):
            *inputs, log_sum_exp = kept[4 * number : 4 * number + 4]
            upper, made = run.by_head(grad), run.by_head(context)
            found = flash_backward(upper, *inputs, made, log_sum_exp, 0.0, True, scale=ctx.scale)
            for whole, of_run in zip(grads, found, strict=True):
                run.by_head(whole).copy_(of_run)
        return *grads, None, None
