"""Reverse KL from a teacher over its likeliest tokens, on vocabulary-parallel logits.

With K the teacher's k likeliest tokens at a position, p the policy's probabilities and q the teacher's, and P and Q
what they leave to all other tokens,

    D = sum_{v in K} p_v (log p_v - log q_v) + P (log P - log Q).

It is the KL of the two distributions once all tokens outside of K are one, so 0 <= D <= KL(p || q), and with k the
whole vocabulary D is KL(p || q): the loss of GKD (arXiv 2306.13649) at beta 1. With g_v = log p_v - log q_v in K and
log P - log Q outside, D = sum_v p_v g_v over all tokens, and its derivative by a logit z_v is p_v (g_v - D) / T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rljob_worker.algorithms.logits import (
    LogitsTransform,
    RowSums,
    VocabShard,
    logits_gradient,
    row_chunks,
    row_sums,
    scaled_logits,
)
from rljob_worker.types import SamplingParams


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """A teacher's probabilities at n positions, in nats."""

    log_probs: Tensor
    """[n] float32, of the sampled tokens."""
    rest: Tensor
    """[n] float32, of all tokens that are not among `ids`; -inf where there are none."""
    top: Tensor
    """[n, k] float32, of `ids`, the largest first."""
    ids: Tensor
    """[n, k] int64."""

    @classmethod
    def of(cls, table: Tensor) -> TeacherRows:
        """Unpack what `packed` made."""
        k = (table.shape[1] - 2) // 2
        return cls(table[:, 0], table[:, 1], table[:, 2 : 2 + k], table[:, 2 + k :].long())

    def packed(self) -> Tensor:
        """[n, 2 + 2 k] float32."""
        return torch.cat([self.log_probs[:, None], self.rest[:, None], self.top, self.ids.float()], dim=1)

    def at(self, rows: slice) -> TeacherRows:
        """Select some positions."""
        return TeacherRows(self.log_probs[rows], self.rest[rows], self.top[rows], self.ids[rows])


def whole_distribution(sampling: SamplingParams, vocab_size: int) -> float:
    """The temperature of a sampling that leaves no token out; ValueError of another one."""
    transform = LogitsTransform.resolve(sampling, vocab_size)
    if transform.filters:
        raise ValueError("sampling: a divergence is of whole distributions; top_p must be 1, top_k 0 and min_p 0")
    return transform.temperature


@torch.no_grad()
def teacher_rows(logits: Tensor, labels: Tensor, k: int, temperature: float, shard: VocabShard) -> TeacherRows:
    """The teacher's probabilities of labels and of its k likeliest tokens.

    Args:
        logits: [n, width], this rank's columns.
        labels: [n] int64.
        k: at most the vocabulary's size.
        temperature: that logits are divided by.
        shard: the columns.

    Returns:
        The same on all ranks of the shard's group.

    Raises:
        ValueError: a `k` that is larger than the vocabulary.
    """
    if k > shard.vocab_size:
        raise ValueError(f"algorithm.distill.topK: {k} is more than the vocabulary's {shard.vocab_size} tokens")
    sums = row_sums(logits, labels, None, temperature, shard, entropy=False)
    count, own = len(labels), min(k, shard.valid)
    values = torch.full((count, k), -torch.inf, device=logits.device)
    ids = torch.zeros((count, k), dtype=torch.int64, device=logits.device)
    for rows in row_chunks(logits, shard.valid):
        found = scaled_logits(logits[rows], temperature, shard, None).topk(own, dim=-1)
        values[rows, :own], ids[rows, :own] = found.values, found.indices + shard.start
    if shard.group is not None:
        values, ids = _largest(values, ids, k, shard.group)
    top = (values - sums.maximum[:, None]) - sums.log_total[:, None]
    rest = _others(logits, ids, temperature, shard)
    return TeacherRows(sums.log_probs, (rest - sums.maximum) - sums.log_total, top, ids)


def _largest(values: Tensor, ids: Tensor, k: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The k largest of all ranks' [n, k] with their ids; of equal ones the earlier rank's."""
    size = dist.get_world_size(group)
    parts, numbers = [torch.empty_like(values) for _ in range(size)], [torch.empty_like(ids) for _ in range(size)]
    dist.all_gather(parts, values.contiguous(), group=group)
    dist.all_gather(numbers, ids.contiguous(), group=group)
    ordered = torch.cat(parts, dim=1).sort(dim=1, descending=True, stable=True)
    return ordered.values[:, :k], torch.cat(numbers, dim=1).gather(1, ordered.indices[:, :k])


def _others(logits: Tensor, ids: Tensor, temperature: float, shard: VocabShard) -> Tensor:
    """Log of the sum of exp(z) over tokens that are not among `ids`: [n] float32, -inf where there are none.

    By a maximum of their own: beside a token of probability 1 they would all be 0 in float32.
    """
    maximum = torch.full((len(ids),), -torch.inf, device=logits.device)
    total = torch.zeros_like(maximum)
    column = _columns(ids, shard)
    for rows in row_chunks(logits, shard.valid):
        left = _with_spare(scaled_logits(logits[rows], temperature, shard, None)).scatter_(1, column[rows], -torch.inf)
        maximum[rows] = left[:, :-1].amax(dim=-1)
        shift = torch.where(maximum[rows].isfinite(), maximum[rows], 0.0)
        total[rows] = (left[:, :-1] - shift[:, None]).exp_().sum(dim=-1)
    largest = shard.all_reduce(maximum.clone(), dist.ReduceOp.MAX)
    known = torch.where(largest.isfinite(), largest, 0.0)
    scale = torch.where(maximum.isfinite(), maximum - known, -torch.inf).exp()
    return shard.all_reduce(total * scale, dist.ReduceOp.SUM).log() + known


def _columns(ids: Tensor, shard: VocabShard) -> Tensor:
    """Columns of ids in this shard, and one behind all of them for the others."""
    column = ids - shard.start
    return torch.where((column >= 0) & (column < shard.valid), column, shard.valid)


def _with_spare(values: Tensor) -> Tensor:
    """A copy of [n, width] with one more column, which is written to and not read."""
    return torch.cat([values, values.new_zeros(len(values), 1)], dim=1)


@dataclass(frozen=True, slots=True)
class Distance:
    """D of each row, and what its gradient needs; equal on all ranks of the shard's group."""

    divergence: Tensor
    """[n] float32."""
    gaps: Tensor
    """[n, k] float32: log p - log q of the teacher's tokens."""
    rest: Tensor
    """[n] float32: log P - log Q; 0 where the policy leaves nothing to other tokens."""

    @classmethod
    def joined(cls, parts: list[Distance]) -> Distance:
        """Join blocks of rows that follow each other."""
        return cls(
            *(torch.cat(of_all) for of_all in zip(*((p.divergence, p.gaps, p.rest) for p in parts), strict=True))
        )

    def at(self, rows: slice) -> Distance:
        """Some rows."""
        return Distance(self.divergence[rows], self.gaps[rows], self.rest[rows])


def distance(logits: Tensor, teacher: TeacherRows, sums: RowSums, temperature: float, shard: VocabShard) -> Distance:
    """D of a policy's logits [n, width], whose sums are known."""
    column = _columns(teacher.ids, shard)
    # Of each row: z of the teacher's tokens, and the sum of exp(z) of the others.
    found = torch.zeros((len(logits), teacher.ids.shape[1] + 1), device=logits.device)
    for rows in row_chunks(logits, shard.valid):
        shifted = _with_spare(scaled_logits(logits[rows], temperature, shard, None) - sums.maximum[rows, None])
        shifted[:, -1] = 0
        found[rows, :-1] = shifted.gather(1, column[rows])
        found[rows, -1] = shifted.exp_().scatter_(1, column[rows], 0.0)[:, :-1].sum(dim=-1)
    shard.all_reduce(found, dist.ReduceOp.SUM)
    log_probs = found[:, :-1] - sums.log_total[:, None]
    left = found[:, -1].log() - sums.log_total
    gaps = log_probs - teacher.top
    rest = torch.where(found[:, -1] > 0, left - teacher.rest, 0.0)
    return Distance((log_probs.exp() * gaps).sum(dim=-1) + left.exp() * rest, gaps, rest)


def distance_gradient(
    log_probs: Tensor, teacher: TeacherRows, known: Distance, gradient: Tensor, shard: VocabShard
) -> Tensor:
    """The gradient of z from that of D, for a chunk of rows.

    Args:
        log_probs: [n, valid] float32, the policy's, of this shard's tokens.
        teacher: at these rows.
        known: at these rows.
        gradient: [n] float32, of D.
        shard: the columns.

    Returns:
        [n, valid] float32.
    """
    spread = known.rest[:, None].expand(-1, shard.valid + 1).contiguous()
    spread.scatter_(1, _columns(teacher.ids, shard), known.gaps)
    return log_probs.exp().mul_(spread[:, :-1].sub_(known.divergence[:, None])).mul_(gradient[:, None])


class _Context(Protocol):
    """State that `_Divergence` keeps between its passes."""

    settings: tuple[TeacherRows, Distance, float, VocabShard]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Divergence(torch.autograd.Function):
    """[n, width] -> [n]; see `divergence`."""

    @staticmethod
    def forward(
        ctx: _Context, logits: Tensor, labels: Tensor, teacher: TeacherRows, temperature: float, shard: VocabShard
    ) -> Tensor:
        sums = row_sums(logits, labels, None, temperature, shard, entropy=False)
        known = distance(logits, teacher, sums, temperature, shard)
        ctx.save_for_backward(logits, labels, sums.maximum, sums.log_total, sums.log_probs, sums.entropy)
        ctx.settings = teacher, known, temperature, shard
        return known.divergence.clone()

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, labels, maximum, log_total, log_probs, entropy = ctx.saved_tensors
        teacher, known, temperature, shard = ctx.settings

        def beside(of_rows: Tensor, rows: slice) -> Tensor:
            return distance_gradient(of_rows, teacher.at(rows), known.at(rows), gradient[rows], shard)

        nothing = torch.zeros_like(gradient)
        found = logits_gradient(
            logits,
            labels,
            None,
            RowSums(log_probs, entropy, maximum, log_total),
            (nothing, nothing),
            temperature,
            shard,
            entropy_grad=False,
            into=torch.empty_like(logits),
            beside=beside,
        )
        return found, None, None, None, None


def divergence(logits: Tensor, labels: Tensor, teacher: TeacherRows, temperature: float, shard: VocabShard) -> Tensor:
    """D [n] of a policy's logits [n, width] that are all there, differentiable; equal on all ranks of the shard."""
    found: Tensor = _Divergence.apply(logits, labels, teacher, temperature, shard)
    return found
