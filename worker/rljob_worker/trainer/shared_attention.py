"""Causal attention over a row in which sequences go on from prompts that stand there once; on CPU.

A token after such a prompt looks at all of the prompt and, causally, at what came since. Both parts come from torch's
kernel, each with the logarithm of its sum of exponentials, by which they are joined; backward, each part is given what
was joined, as in ring attention (Liu et al., arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from rljob_worker.trainer.packed_attention import Run, flash, flash_backward, runs


@dataclass(frozen=True, slots=True)
class _Part:
    """Work of one call of the kernel."""

    queries: Run
    keys: Run
    causal: bool


def attend_shared_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, bounds: Sequence[int], prefixes: Sequence[int], scale: float
) -> Tensor:
    """Context of a row.

    Args:
        query: [T, H, D] float32 or float64.
        key: [T, G, D], where G divides H.
        value: the same.
        bounds: [s + 1], where each segment begins; the last is T.
        prefixes: [s], the segment that each one goes on from, which itself goes on from none, or -1.
        scale: of the scores.

    Returns:
        [T, H, D], contiguous.
    """
    context: Tensor = _SharedAttention.apply(query, key, value, tuple(_parts(bounds, prefixes)), scale)
    return context


def _parts(bounds: Sequence[int], prefixes: Sequence[int]) -> list[_Part]:
    """First each segment's look at itself, then those at prompts, of neighbours at once."""
    parts = [_Part(run, run, True) for run in runs(bounds)]
    for prefix, group in groupby(range(len(prefixes)), key=lambda segment: prefixes[segment]):
        if prefix >= 0:
            segments = list(group)
            begin, end = bounds[segments[0]], bounds[segments[-1] + 1]
            prompt = Run(bounds[prefix], 1, bounds[prefix + 1] - bounds[prefix])
            parts.append(_Part(Run(begin, 1, end - begin), prompt, False))
    return parts


class _Context(Protocol):
    parts: tuple[_Part, ...]
    scale: float

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, query: Tensor, key: Tensor, value: Tensor, parts: tuple[_Part, ...], scale: float
    ) -> Tensor:
        context = torch.empty_like(query, memory_format=torch.contiguous_format)
        sums = query.new_empty(*query.shape[:2], 1)
        for part in parts:
            (queries,), keys = part.queries.inputs(query), part.keys.inputs(key, value)
            made, log_sum = flash(queries, *keys, 0.0, part.causal, scale=scale)
            log_sum = log_sum.unsqueeze(-1)
            into, sum_into = part.queries.by_head(context), part.queries.by_head(sums)
            if part.causal:
                into.copy_(made)
                sum_into.copy_(log_sum)
                continue
            joined = torch.logaddexp(sum_into, log_sum)
            into.mul_((sum_into - joined).exp_()).add_(made.mul_((log_sum - joined).exp_()))
            sum_into.copy_(joined)
        ctx.save_for_backward(query, key, value, context, sums)
        ctx.parts, ctx.scale = parts, scale
        return context

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, context, sums = ctx.saved_tensors
        grads = [torch.empty_like(given, memory_format=torch.contiguous_format) for given in (query, key, value)]
        for part in ctx.parts:
            upper, queries, made, log_sum = part.queries.inputs(grad, query, context, sums)
            keys = part.keys.inputs(key, value)
            found = flash_backward(upper, queries, *keys, made, log_sum.squeeze(-1), 0.0, part.causal, scale=ctx.scale)
            for whole, of_part, run in zip(grads, found, (part.queries, part.keys, part.keys), strict=True):
                # Each token is in one causal part, and these come first.
                into = run.by_head(whole)
                into.copy_(of_part) if part.causal else into.add_(of_part)
        return *grads, None, None
