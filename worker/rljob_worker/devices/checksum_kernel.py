"""The checksum's sums on an NVIDIA GPU in one pass over the words; Triton comes with torch's CUDA build."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WORDS = 1024
"""Words that a program takes at once."""
_TIMES = 16
"""Repetitions in a program: more programs add to the same row, fewer leave a small tensor to few of them."""


@triton.jit
def _add_rows(words, weights, sums, count, ROW: tl.constexpr, WORDS: tl.constexpr, TIMES: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) // (ROW // (WORDS * TIMES))
    first = tl.program_id(0) % (ROW // (WORDS * TIMES)) * (WORDS * TIMES)
    total = tl.zeros([WORDS], tl.int64)
    for time in range(TIMES):
        place = first + time * WORDS + tl.arange(0, WORDS)
        at = row.to(tl.int64) * ROW + place
        word = tl.load(words + at, mask=at < count, other=0)
        total += word.to(tl.int64) * tl.load(weights + place)
    tl.atomic_add(sums + row, tl.sum(total, 0))


def row_sums(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: sum_i m_i * w_i modulo 2**64 of each row of words int32 [n], as long as weights int64 [row]."""
    row, count = len(weights), words.numel()
    rows = -(-count // row)
    sums = torch.zeros(rows, dtype=torch.int64, device=words.device)
    programs = min(rows * (row // (_WORDS * _TIMES)), -(-count // (_WORDS * _TIMES)))
    _add_rows[(programs,)](words, weights, sums, count, ROW=row, WORDS=_WORDS, TIMES=_TIMES)
    return sums
