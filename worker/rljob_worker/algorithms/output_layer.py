"""The output layer and the log-probabilities under it in one, in blocks of rows.

With a large vocabulary the logits are most of what a long sequence needs. Here those of the first rows are kept for the
backward pass, as many as fit a fixed number of bytes; of the others a block at a time is there, and is multiplied again
in the backward pass. Short micro-batches are multiplied once, long ones need no more memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rljob_worker.algorithms.divergence import (
    Distance,
    TeacherRows,
    distance,
    distance_gradient,
    divergence,
    teacher_rows,
    whole_distribution,
)
from rljob_worker.algorithms.logits import (
    LogitsTransform,
    RowSums,
    VocabShard,
    keep_mask,
    logits_gradient,
    response_log_probs,
    row_sums,
)
from rljob_worker.types import SamplingParams

KEPT_BYTES = {"cpu": 512 * 2**20}
"""Logits that are kept for the backward pass, by device type."""
DEFAULT_KEPT_BYTES = 2 * 2**30
"""Elsewhere: 7,000 rows of a vocabulary of 152,000 in bf16."""
BLOCK_BYTES = {"cpu": 64 * 2**20}
"""Logits of a block that is multiplied again."""
DEFAULT_BLOCK_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Blocks:
    """Numbers of rows: of kept logits, and of those of the others that are there at once."""

    kept: int
    block: int

    @classmethod
    def of(cls, row_bytes: int, device_type: str) -> Blocks:
        """For logits of so many bytes a row; a row at least."""
        kept = KEPT_BYTES.get(device_type, DEFAULT_KEPT_BYTES)
        block = BLOCK_BYTES.get(device_type, DEFAULT_BLOCK_BYTES)
        return cls(max(1, kept // row_bytes), max(1, block // row_bytes))

    def at_once(self, rows: int) -> int:
        """Rows whose logits are there at the peak of a backward pass over so many."""
        return min(rows, self.kept) + min(max(rows - self.kept, 0), self.block)

    def slices(self, rows: int) -> list[slice]:
        """The kept rows, then the blocks."""
        edges = [0, *range(self.kept, rows, self.block), rows] if rows > self.kept else [0, rows]
        return [slice(first, end) for first, end in itertools.pairwise(edges)]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Values to compute for each row."""

    sampling: SamplingParams
    """The engine's."""
    vocab_size: int
    """Tokens without padding."""
    entropy: bool = True
    """Compute the entropy; zeros otherwise."""
    entropy_grad: bool = False
    """Make it differentiable (needed where an entropy bonus is in the loss)."""
    divergence: bool = False
    """Compute the divergence from the teacher, where its likeliest tokens are known."""
    top: int = 0
    """Number of likeliest tokens that a teacher gives, as a table of `TeacherRows`; 0: none."""


class _Context(Protocol):
    """State that `_OutputLogProbs` keeps between its passes."""

    head: _Head
    distance: Distance | None
    needs_input_grad: tuple[bool, ...]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class _Head:
    """Settings that all blocks share."""

    transform: LogitsTransform
    shard: VocabShard
    blocks: Blocks
    wanted: Wanted
    teacher: TeacherRows | None = None
    """Origin of a divergence; None: none is computed."""

    def logits(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits of a block, and a mask of the tokens that the engine could have sampled; None: all."""
        logits = hidden @ weight.t()
        keep = keep_mask(logits, labels, self.transform, self.shard) if self.transform.filters else None
        return logits, keep


class _OutputLogProbs(torch.autograd.Function):
    """[n, h] and [columns, h] -> [n], [n], and [n] where there is a teacher; see `output_log_probs`."""

    @staticmethod
    def forward(ctx: _Context, hidden: Tensor, weight: Tensor, labels: Tensor, head: _Head) -> tuple[Tensor, ...]:
        found: list[RowSums] = []
        distances: list[Distance] = []
        kept: tuple[Tensor, Tensor | None] | None = None
        for rows in head.blocks.slices(len(hidden)):
            logits, keep = head.logits(hidden[rows], weight, labels[rows])
            found.append(
                row_sums(
                    logits, labels[rows], keep, head.transform.temperature, head.shard, entropy=head.wanted.entropy
                )
            )
            if head.teacher is not None:
                teacher = head.teacher.at(rows)
                distances.append(distance(logits, teacher, found[-1], head.transform.temperature, head.shard))
            kept = kept or (logits, keep)
            del logits, keep
        assert kept is not None
        sums = RowSums.joined(found)
        ctx.save_for_backward(hidden, weight, labels, sums.maximum, sums.log_total, sums.log_probs, sums.entropy, *kept)
        ctx.head, ctx.distance = head, Distance.joined(distances) if distances else None
        if not head.wanted.entropy_grad:
            ctx.mark_non_differentiable(sums.entropy)
        if ctx.distance is None:
            return sums.log_probs, sums.entropy
        return sums.log_probs, sums.entropy, ctx.distance.divergence.clone()

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, labels, maximum, log_total, log_probs, entropy, kept, kept_mask = ctx.saved_tensors
        head, sums = ctx.head, RowSums(log_probs, entropy, maximum, log_total)
        grad_hidden = torch.empty_like(hidden)
        slices = head.blocks.slices(len(hidden))
        # In fp32 where several products are added up.
        total = torch.zeros_like(weight, dtype=torch.float32) if len(slices) > 1 and ctx.needs_input_grad[1] else None
        grad_weight: Tensor | None = None
        # The blocks first: what is kept then makes room for nobody.
        for rows in slices[::-1]:
            again = rows.start > 0
            logits, keep = head.logits(hidden[rows], weight, labels[rows]) if again else (kept, kept_mask)
            grad = logits_gradient(
                logits,
                labels[rows],
                keep,
                sums.of(rows),
                (grads[0][rows], grads[1][rows]),
                head.transform.temperature,
                head.shard,
                entropy_grad=head.wanted.entropy_grad,
                into=logits,
                beside=_beside(head, ctx.distance, grads, rows),
            )
            grad_hidden[rows] = grad @ weight
            if total is not None:
                _add_product(total, grad.t(), hidden[rows])
            elif ctx.needs_input_grad[1]:
                grad_weight = grad.t() @ hidden[rows]
            del logits, grad
        if total is not None:
            grad_weight = total.to(weight.dtype)
        if head.shard.group is not None:
            dist.all_reduce(grad_hidden, group=head.shard.group)
        return grad_hidden, grad_weight, None, None


def _beside(
    head: _Head, known: Distance | None, grads: Sequence[Tensor], block: slice
) -> Callable[[Tensor, slice], Tensor] | None:
    """The gradient of a block's divergences, for `logits_gradient`."""
    if known is None or head.teacher is None:
        return None
    teacher, here, gradient = head.teacher.at(block), known.at(block), grads[2][block]

    def of_chunk(log_probs: Tensor, rows: slice) -> Tensor:
        return distance_gradient(log_probs, teacher.at(rows), here.at(rows), gradient[rows], head.shard)

    return of_chunk


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Without a product beside an fp32 sum of fp32 factors; it is as large as the output layer."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def output_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    wanted: Wanted,
    group: dist.ProcessGroup | None,
    teacher: TeacherRows | None = None,
) -> tuple[Tensor, ...]:
    """`logits.response_log_probs` of `hidden @ weight.T`, whose logits are never all there.

    Args:
        hidden: [n, h], of the positions that matter only; equal on all ranks of `group`.
        weight: [columns, h], this rank's part of the output layer; of all ranks equally wide, padding included.
        labels: [n] int64 token ids below the vocabulary's size; others give NaN.
        wanted: what of each row.
        group: the ranks that hold the other parts, in vocabulary order; None when there are none.
        teacher: from which the divergence is computed too.

    Returns:
        (log_probs, entropy), and the divergence where there is a teacher; all [n] float32, in nats, equal on all ranks
        of `group`. The gradient of `hidden` is added up over them; a product of a kept block is not made twice, and a
        second backward pass is refused by torch.

    Raises:
        ValueError: shapes that do not fit, sampling parameters out of range, fewer columns than tokens, or a teacher
            beside a sampling that leaves tokens out.
    """
    if len(hidden) != len(labels):
        raise ValueError(f"labels: {len(labels)} of them do not fit {len(hidden)} rows")
    columns = len(weight)
    head = _Head(
        LogitsTransform.resolve(wanted.sampling, wanted.vocab_size),
        VocabShard.of(columns, wanted.vocab_size, group),
        Blocks.of(columns * weight.element_size(), weight.device.type),
        wanted,
        teacher,
    )
    if teacher is not None:
        whole_distribution(wanted.sampling, wanted.vocab_size)
    found: tuple[Tensor, ...] = _OutputLogProbs.apply(hidden, weight, labels, head)
    return found


def token_table(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    wanted: Wanted,
    group: dist.ProcessGroup | None,
    teacher: Tensor | None = None,
) -> Tensor:
    """The values of each row beside each other, as `TokenValues.of_table` reads them; see `output_log_probs`.

    Args:
        hidden: [n, h].
        weight: [columns, h].
        labels: [n].
        wanted: with `top`, the table of `TeacherRows`, without gradients.
        group: the ranks that hold the other parts.
        teacher: [n, c], that table; needed where the divergence is wanted.

    Returns:
        [n, columns of the table] float32.
    """
    if not wanted.top:
        known = _tokens_of(teacher, wanted)
        return torch.stack(output_log_probs(hidden, weight, labels, wanted, group, known), dim=-1)
    columns = len(weight)
    shard = VocabShard.of(columns, wanted.vocab_size, group)
    temperature = whole_distribution(wanted.sampling, wanted.vocab_size)
    parts = [
        teacher_rows(hidden[rows] @ weight.t(), labels[rows], wanted.top, temperature, shard).packed()
        for rows in Blocks.of(columns * weight.element_size(), weight.device.type).slices(len(hidden))
    ]
    return torch.cat(parts)


def table_of_logits(logits: Tensor, labels: Tensor, wanted: Wanted, teacher: Tensor | None = None) -> Tensor:
    """`token_table` of all logits [n, width], of a model that changes them after its head."""
    if wanted.top:
        shard = VocabShard.of(logits.shape[-1], wanted.vocab_size, None)
        temperature = whole_distribution(wanted.sampling, wanted.vocab_size)
        return teacher_rows(logits, labels, wanted.top, temperature, shard).packed()
    values: tuple[Tensor, ...] = response_log_probs(
        logits,
        labels,
        wanted.sampling,
        None,
        wanted.vocab_size,
        with_entropy=wanted.entropy,
        entropy_grad=wanted.entropy_grad,
    )
    known = _tokens_of(teacher, wanted)
    if known is not None:
        temperature = whole_distribution(wanted.sampling, wanted.vocab_size)
        shard = VocabShard.of(logits.shape[-1], wanted.vocab_size, None)
        values = (*values, divergence(logits, labels, known, temperature, shard))
    return torch.stack(values, dim=-1)


def _tokens_of(table: Tensor | None, wanted: Wanted) -> TeacherRows | None:
    return TeacherRows.of(table) if wanted.divergence and table is not None else None
