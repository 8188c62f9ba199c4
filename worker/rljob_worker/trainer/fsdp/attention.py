"""Attention over a row of samples, as transformers' models call it: each sample sees itself alone, without a mask.

transformers' own attention on torch's kernels takes a mask of T x T for a row, which costs T / L times the work of its
samples of L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from rljob_worker.models.hf_model import PACKED
from rljob_worker.trainer.context_parallel import to_heads, to_tokens
from rljob_worker.trainer.packed_attention import Run, attend_on_cpu, attend_on_cuda, attend_on_npu, runs

_ATTEND = {"cpu": attend_on_cpu, "cuda": attend_on_cuda, "npu": attend_on_npu}


def register_packed_attention() -> str:
    """Make it known to transformers; its name there."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)
    return PACKED


@dataclass(frozen=True, slots=True)
class _Scores:
    """The way from scores to probabilities, beside their causal mask."""

    scale: float
    window: int | None
    """Tokens that each one sees, itself included; None: all before it."""
    cap: float | None
    sinks: Tensor | None
    """[H], a further score of each head, of which the probability is dropped."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_bounds: Sequence[int],
    context_group: dist.ProcessGroup | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_kwargs: object,
) -> tuple[Tensor, None]:
    """Context [1, T, H, D] of a row, on kernels of torch where they can, or by the formula.

    Args:
        module: the attention layer.
        query: [1, H, T, D].
        key: [1, G, T, D], where G divides H.
        value: the same; its D may be another one.
        attention_mask: none.
        row_bounds: [s + 1], where each sample begins; the last is T, of the whole row.
        context_group: n ranks, each of which has T / n of the row's tokens; None: this one has all.
        scaling: of the scores; default: 1 / sqrt(D).
        dropout: none.
        sliding_window: tokens that each one sees, itself included.
        softcap: bound of the scores.
        s_aux: [H], attention sinks.

    Raises:
        ValueError: what a row cannot be computed with.
    """
    if attention_mask is not None or dropout or not getattr(module, "is_causal", True):
        raise ValueError("a row of samples has causal attention without a mask or dropout")
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    if context_group is not None:
        query, key, value = to_heads([query, key, value], context_group)
        if s_aux is not None:
            s_aux = s_aux.chunk(context_group.size())[context_group.rank()]
    longest = max(end - begin for begin, end in pairwise(row_bounds))
    window = sliding_window if sliding_window is not None and sliding_window < longest else None
    how = _Scores(scaling or query.shape[-1] ** -0.5, window, softcap, s_aux)
    if softcap is None and s_aux is None and window is None and value.shape[-1] == query.shape[-1]:
        context = _ATTEND[query.device.type](query, key, value, row_bounds, how.scale)
    else:
        context = torch.cat([_attend(run, query, key, value, how) for run in runs(row_bounds)])
    if context_group is not None:
        context = to_tokens(context, context_group)
    return context.unsqueeze(0), None


def _attend(run: Run, query: Tensor, key: Tensor, value: Tensor, how: _Scores) -> Tensor:
    """[tokens of the run, H, D]."""
    query, key, value = run.inputs(query, key, value)
    allowed = _allowed(run.length, how.window, query.device)
    if how.cap is None and how.sinks is None:
        grouped = query.shape[1] != key.shape[1]
        context = F.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, scale=how.scale, enable_gqa=grouped
        )
    else:
        repeats = query.shape[1] // key.shape[1]
        scores = (query @ key.repeat_interleave(repeats, 1).transpose(2, 3)).float() * how.scale
        if how.cap is not None:
            scores = torch.tanh(scores / how.cap) * how.cap
        scores = scores.masked_fill(~allowed, -torch.inf)
        if how.sinks is not None:
            sinks = how.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            probabilities = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        else:
            probabilities = scores.softmax(-1)
        context = probabilities.to(value.dtype) @ value.repeat_interleave(repeats, 1)
    return context.transpose(1, 2).flatten(0, 1)


def _allowed(length: int, window: int | None, device: torch.device) -> Tensor:
    """[L, L] bool, which tokens see which."""
    back = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (back >= 0) if window is None else (back >= 0) & (back < window)
