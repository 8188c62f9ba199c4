"""From the samples of a step to each rank's padded micro-batches: pure, deterministic, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rljob_worker.types import ExpertArray, IntArray, TrainBatch

GROUPS_PER_BOUND = 64
"""The fixed cost of a micro-batch is taken to be that of this part of the largest one's tokens."""


def split_evenly(lengths: IntArray, parts: int) -> list[IntArray]:
    """Indices of `lengths` [N] for each of `parts` ranks, longest first.

    Sample counts differ by at most one. Dealing the sorted samples out and back keeps token counts close and gives
    all ranks micro-batches of like shape, which ranks that exchange experts wait for one another by.
    """
    order = np.argsort(-lengths, kind="stable").astype(np.int64)
    rank = np.arange(len(order)) % (2 * parts)
    rank = np.where(rank < parts, rank, 2 * parts - 1 - rank)
    return [order[rank == part] for part in range(parts)]


def group_by_tokens(lengths: IntArray, order: IntArray, max_tokens: int) -> list[IntArray]:
    """Cut `order` (indices, longest first) into groups of at most `max_tokens` padded tokens.

    Of all cuts, the one with the least padded tokens, where each group counts `max_tokens / GROUPS_PER_BOUND` tokens
    more for what a micro-batch costs whatever its size. A sample longer than the bound is a group of its own.
    """
    sizes = lengths[order]
    count = len(sizes)
    if count and count * sizes[0] <= max_tokens and sizes[0] == sizes[-1]:
        return [order]
    overhead = max_tokens / GROUPS_PER_BOUND
    # best[j]: least cost of the first j samples; start[j]: where the last of their groups begins.
    best = np.zeros(count + 1)
    start = np.zeros(count + 1, dtype=np.int64)
    first = 0
    for end in range(1, count + 1):
        while first < end - 1 and (end - first) * sizes[first] > max_tokens:
            first += 1
        costs = best[first:end] + np.arange(end - first, 0, -1) * sizes[first:end]
        chosen = int(costs.argmin())
        best[end] = costs[chosen] + overhead
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
        largest = int(np.argmax(tokens)) if tokens else 0
        if not tokens or tokens[largest] == 0:
            groups.append(np.empty(0, dtype=np.int64))
            continue
        group = groups[largest]
        half = (len(group) + 1) // 2
        groups[largest : largest + 1] = [group[:half], group[half:]]
    return groups


def plan_update(lengths: IntArray, parts: int, part: int, max_tokens: int) -> list[IntArray]:
    """Micro-batches (sample indices) of data-parallel rank `part`; every rank gets the same number of them."""
    shares = [group_by_tokens(lengths, order, max_tokens) for order in split_evenly(lengths, parts)]
    return split_to_count(shares[part], lengths, max(1, *(len(share) for share in shares)))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Right-padded inputs of `b` samples, and their `n` response tokens packed one sample after the other."""

    samples: IntArray
    """[b] indices into the step's batch; empty for a filler that only keeps ranks in step."""
    input_ids: Tensor
    """[b, S] int64: all tokens but the last one."""
    position_ids: Tensor
    """[b, S] int64."""
    rows: Tensor
    """[n] int64, rows of the [b * S] hidden states that predict a response token."""
    labels: Tensor
    """[n] int64, the response tokens."""
    sequences: Tensor
    """[n] int64, which response each of them belongs to, below n: rows without response tokens are not counted."""
    mask: Tensor
    """[b, R] bool, one row a response, False where padded; its true places, in row order, are the packed tokens."""
    rollout_log_probs: Tensor
    """[n] float32."""
    advantages: Tensor
    """[n] float32."""
    versions: Tensor
    """[n] int64, the weights that sampled each of them."""
    experts: Tensor | None = None
    """[S, b, layers with experts, experts of a token] uint8 or int16, to route by; None: the trainer's own choice."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same with its tensors on `device`; itself where they are there."""
        if self.input_ids.device == device:
            return self
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        moved: dict[str, Any] = {name: value.to(device) for name, value in values if isinstance(value, Tensor)}
        return replace(self, **moved)

    def padded(self, multiple: int) -> MicroBatch:
        """The same with what has S entries rounded up to a multiple."""
        missing = -self.input_ids.shape[1] % multiple
        if not missing:
            return self
        length = self.input_ids.shape[1]
        positions = F.pad(self.position_ids, (0, missing))
        rows = self.rows + self.rows // length * missing
        experts = self.experts
        if experts is not None:
            # Any experts will do where nobody looks at the result, but no expert twice.
            experts = torch.cat([experts, experts[-1:].expand(missing, *experts.shape[1:])])
        ids = F.pad(self.input_ids, (0, missing))
        return replace(self, input_ids=ids, position_ids=positions, rows=rows, experts=experts)

    def with_own_routing(self) -> MicroBatch:
        """The same, routed by the trainer's own choice of experts."""
        return replace(self, experts=None)


class PackedBatch:
    """The streams of a step with where each of them and its sampled tokens begin: micro-batches are cut from them
    without a loop over samples.

    Raises:
        ValueError: the arrays of the batch do not fit together; says which.
    """

    def __init__(self, batch: TrainBatch) -> None:
        _check(batch)
        self.lengths = batch.lengths
        self.tokens = batch.tokens
        self.starts: IntArray = np.cumsum(self.lengths) - self.lengths
        flat = np.flatnonzero(batch.sampled)
        first = np.searchsorted(flat, self.starts)
        self.responses: IntArray = np.append(first[1:], len(flat)) - first
        self.sampled_starts: IntArray = first
        self.places: IntArray = flat - np.repeat(self.starts, self.responses)
        """[n], where in its own stream each sampled token is."""
        self.rollout = batch.rollout_log_probs
        self.advantages = batch.advantages
        self.versions = batch.versions
        # Streams of a single token each have none.
        self.experts = batch.experts if batch.experts is not None and len(batch.experts) else None

    def __len__(self) -> int:
        return len(self.lengths)

    def micro_batch(self, samples: IntArray) -> MicroBatch:
        """Inputs for the samples with these indices."""
        if not len(samples):
            return _filler()
        lengths, counts, b = self.lengths[samples], self.responses[samples], len(samples)
        columns = np.arange(max(1, int(lengths.max()) - 1))
        places = self.starts[samples][:, None] + columns
        inside = columns < lengths[:, None] - 1
        input_ids = np.where(inside, self.tokens[np.minimum(places, len(self.tokens) - 1)], 0)

        row = np.repeat(np.arange(b), counts)
        first = np.cumsum(counts) - counts
        within = np.arange(len(row)) - first[row]
        chosen = self.sampled_starts[samples][row] + within
        in_sample = self.places[chosen]
        return MicroBatch(
            samples=samples,
            input_ids=torch.from_numpy(input_ids),
            position_ids=torch.from_numpy(columns).expand(b, -1),
            rows=torch.from_numpy(row * len(columns) + in_sample - 1),
            labels=torch.from_numpy(self.tokens[self.starts[samples][row] + in_sample]),
            sequences=torch.from_numpy(np.repeat(np.cumsum(counts > 0) - 1, counts)),
            mask=torch.from_numpy(np.arange(max(1, int(counts.max()))) < counts[:, None]),
            rollout_log_probs=torch.from_numpy(self.rollout[chosen]),
            advantages=torch.from_numpy(self.advantages[chosen]),
            versions=torch.from_numpy(self.versions[chosen]),
            experts=None if self.experts is None else self._experts(self.experts, samples, columns),
        )

    def _experts(self, experts: ExpertArray, samples: IntArray, columns: IntArray) -> Tensor:
        """[S, b, ...]: padding is sent to where the last of a sample's tokens goes."""
        within = np.minimum(columns[:, None], np.maximum(self.lengths[samples] - 2, 0))
        # A stream has one row less than tokens.
        rows = (self.starts - np.arange(len(self)))[samples] + within
        chosen = experts[np.minimum(rows, len(experts) - 1)]
        # torch computes little with unsigned 16 bits.
        return torch.from_numpy(chosen if chosen.dtype == np.uint8 else chosen.astype(np.int16))


def _check(batch: TrainBatch) -> None:
    if not len(batch):
        raise ValueError("the training batch has no samples")
    total = int(batch.lengths.sum())
    if int(batch.lengths.min()) < 1 or len(batch.tokens) != total or len(batch.sampled) != total:
        raise ValueError(
            f"the training batch has {len(batch)} samples of {total} tokens together (at least 1 each), but "
            f"{len(batch.tokens)} tokens and {len(batch.sampled)} entries in sampled"
        )
    starts = np.cumsum(batch.lengths) - batch.lengths
    wrong = np.flatnonzero(batch.sampled[starts])
    if len(wrong):
        raise ValueError(f"sample {wrong[0]} of the training batch begins with a sampled token: there is no prompt")
    count = int(batch.sampled.sum())
    for name in ("rollout_log_probs", "advantages", "versions"):
        given = len(getattr(batch, name))
        if given != count:
            raise ValueError(f"the training batch has {count} sampled tokens but {given} entries in {name}")
    if batch.experts is not None and len(batch.experts) != total - len(batch):
        raise ValueError(
            f"the training batch has {total - len(batch)} tokens that others follow but experts of {len(batch.experts)}"
        )


def _filler() -> MicroBatch:
    integers = torch.zeros(1, 1, dtype=torch.int64)
    none = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        samples=np.empty(0, dtype=np.int64),
        input_ids=integers,
        position_ids=integers,
        rows=none,
        labels=none,
        sequences=none,
        mask=torch.zeros(0, 1, dtype=torch.bool),
        rollout_log_probs=torch.zeros(0),
        advantages=torch.zeros(0),
        versions=none,
    )


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update of a step, as one data-parallel rank sees it."""

    micro_batches: list[MicroBatch]
    num_tokens: int
    """Response tokens of the whole update, over all ranks: the denominator of token means."""
    num_sequences: int
    """Samples of the whole update, over all ranks."""


def plan_step(
    packed: PackedBatch, global_batch_size: int | None, parts: int, part: int, max_tokens: int
) -> list[Update]:
    """Cut a step into optimizer updates of `global_batch_size` samples, in order, and each into this rank's share."""
    size = global_batch_size or len(packed)
    if len(packed) % size:
        raise ValueError(f"training.globalBatchSize: {size} does not divide the step's {len(packed)} samples")
    updates = []
    for start in range(0, len(packed), size):
        lengths = np.maximum(packed.lengths[start : start + size] - 1, 1)
        groups = plan_update(lengths, parts, part, max_tokens)
        updates.append(
            Update(
                micro_batches=[packed.micro_batch(group + start) for group in groups],
                num_tokens=int(packed.responses[start : start + size].sum()),
                num_sequences=size,
            )
        )
    return updates
