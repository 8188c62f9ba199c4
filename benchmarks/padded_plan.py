"""Micro-batches as padded rectangles, the plan that rows took the place of: the other side of `train_limit` and
`balance`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rljob_worker.trainer.batches import MicroBatch, PackedBatch, Update
from rljob_worker.trainer.objective import TokenValues
from rljob_worker.trainer.planned_step import PlannedStep
from rljob_worker.trainer.row_shares import share_of
from rljob_worker.trainer.trainer import Trainer
from rljob_worker.types import IntArray, StepMetrics, TrainBatch

GROUPS_PER_BOUND = 64
"""The fixed cost of a micro-batch is taken to be that of this part of the largest one's tokens."""


def split_evenly(lengths: IntArray, parts: int) -> list[IntArray]:
    """Indices for each of `parts` ranks, longest first: the sorted samples dealt out and back."""
    order = np.argsort(-lengths, kind="stable").astype(np.int64)
    rank = np.arange(len(order)) % (2 * parts)
    rank = np.where(rank < parts, rank, 2 * parts - 1 - rank)
    return [order[rank == part] for part in range(parts)]


def group_by_tokens(lengths: IntArray, order: IntArray, max_tokens: int) -> list[IntArray]:
    """The cut of `order` (longest first) into groups of at most `max_tokens` padded tokens that has the least of
    them."""
    sizes = lengths[order]
    count = len(sizes)
    if count and count * sizes[0] <= max_tokens and sizes[0] == sizes[-1]:
        return [order]
    best = np.zeros(count + 1)
    start = np.zeros(count + 1, dtype=np.int64)
    first = 0
    for end in range(1, count + 1):
        while first < end - 1 and (end - first) * sizes[first] > max_tokens:
            first += 1
        costs = best[first:end] + np.arange(end - first, 0, -1) * sizes[first:end]
        chosen = int(costs.argmin())
        best[end] = costs[chosen] + max_tokens / GROUPS_PER_BOUND
        start[end] = first + chosen
    groups: list[IntArray] = []
    end = count
    while end:
        groups.append(order[start[end] : end])
        end = int(start[end])
    return groups[::-1]


def split_to_count(groups: list[IntArray], lengths: IntArray, count: int) -> list[IntArray]:
    """Halve the groups with the most padded tokens until there are `count`; empty groups where samples run out."""
    groups = list(groups)
    while len(groups) < count:
        tokens = [len(group) * int(lengths[group[0]]) if len(group) > 1 else 0 for group in groups]
        largest = int(np.argmax(tokens))
        if tokens[largest] == 0:
            groups.append(np.empty(0, dtype=np.int64))
            continue
        group = groups[largest]
        half = (len(group) + 1) // 2
        groups[largest : largest + 1] = [group[:half], group[half:]]
    return groups


def padded_ranks(lengths: IntArray, parts: int, max_tokens: int) -> list[list[IntArray]]:
    """The groups of each rank, as many on all of them."""
    shares = [group_by_tokens(lengths, order, max_tokens) for order in split_evenly(lengths, parts)]
    return [split_to_count(share, lengths, max(map(len, shares))) for share in shares]


def rectangle(row: MicroBatch) -> MicroBatch:
    """A row's samples padded on the right to the longest: inputs [b, S], hidden states taken from [S, b]."""
    lengths = np.diff(row.bounds)
    count, longest = len(lengths), int(lengths.max())
    inside = torch.from_numpy(np.arange(longest) < lengths[:, None])
    ids = torch.zeros(count, longest, dtype=torch.int64)
    ids[inside] = row.input_ids[0]
    places = torch.zeros(count, longest, dtype=torch.int64)
    places[inside] = torch.arange(len(row.input_ids[0]))
    sample, place = inside.nonzero(as_tuple=True)
    return replace(
        row,
        input_ids=ids,
        position_ids=torch.arange(longest).expand(count, -1),
        rows=(place * count + sample)[row.rows],
    )


class PaddedSide:
    """A trainer of one rank on CPU that takes a step in padded rectangles, as Megatron itself has batches."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        backend: Any = trainer.backend
        self._pipeline, self._model = backend.pipeline, backend.rank.ddp.module
        self._rotary = self._model.rotary_pos_emb

    def plan(self, batch: TrainBatch) -> PlannedStep:
        """The step that the next call with this batch takes."""
        packed = PackedBatch(batch)
        lengths = np.maximum(packed.lengths - 1, 1)
        (groups,) = padded_ranks(lengths, 1, self._trainer.spec.training.max_tokens_per_micro_batch)
        rectangles = [rectangle(packed.micro_batch(group)) for group in groups]
        return PlannedStep(batch, [Update(rectangles, int(packed.responses.sum()), len(packed))])

    def train(self, batch: TrainBatch, *step: Any) -> StepMetrics:
        """Same as the trainer's own, in one update."""
        self._trainer.planned = self.plan(batch)
        self._model.rotary_pos_emb = self._rotary.inner
        self._pipeline.forward_step, rows = self._step, self._pipeline.forward_step
        try:
            return self._trainer.train(batch, *step)
        finally:
            self._pipeline.forward_step = rows
            self._model.rotary_pos_emb = self._rotary

    def _step(self, compute: Any, data: Iterator[tuple[int, MicroBatch]], model: Any) -> tuple[torch.Tensor, Any]:
        index, micro_batch = next(data)
        self._pipeline.expect(share_of(micro_batch, 0, 1), compute.wanted)
        output = model(micro_batch.input_ids, micro_batch.position_ids, None)

        def loss_func(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            loss, result = compute(index, micro_batch, TokenValues.of_table(values.squeeze(0), compute.wanted))
            return loss, torch.zeros((), dtype=torch.int), result

        return output, loss_func
