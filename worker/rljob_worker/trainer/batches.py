"""From the samples of a step to each rank's rows of them: pure, deterministic, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rljob_worker.trainer.dealing import Dealing, Plan
from rljob_worker.trainer.sharing import Prompts, plan_sharing, segments_of
from rljob_worker.types import BatchPictures, ExpertArray, IntArray, TrainBatch


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One row: the inputs of `b` samples, one after the other, and their `n` response tokens in the same order.

    Its `s` segments are the samples, each a sequence. Where samples share their prompt, it is a segment, and so is what
    each of them has after it.
    """

    samples: IntArray
    """[b] indices into the step's batch; empty for a filler that only keeps ranks in step."""
    input_ids: Tensor
    """[1, T] int64: of each sample all tokens but the last one; a prompt that is shared stands once."""
    position_ids: Tensor
    """[1, T] int64, each token's place in its own sample; of a batch with pictures [4, 1, T]: that place, then time,
    row and column."""
    bounds: IntArray
    """[s + 1] int32, where each segment begins; the last is T. On the host, whatever the device is."""
    rows: Tensor
    """[n] int64, which of the T hidden states predict a response token."""
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
    prefixes: IntArray | None = None
    """[s] int32, the segment of the prompt that each segment goes on from, or -1; None: nothing is shared. On the host.
    """
    experts: Tensor | None = None
    """[T, 1, layers with experts, experts of a token] uint8 or int16, to route by; None: the trainer's own choice."""
    patches: Tensor | None = None
    """[p, D] uint8, of the k distinct pictures of the samples; None: no sample has any."""
    grids: Tensor | None = None
    """[k, 3] int64, patches of each of them along time, height and width."""
    pictures: tuple[int, ...] = ()
    """Numbers below k of the pictures in the row, in the order of their places in it."""
    teacher: Tensor | None = None
    """[n, c] float32: a teacher's log-probabilities of the labels, or a table of `TeacherRows`; None: no teacher."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        lengths = np.diff(self.bounds)
        if self.prefixes is not None:
            lengths = lengths + np.where(self.prefixes >= 0, lengths[self.prefixes], 0)
        return int(lengths.max())

    def to(self, device: torch.device) -> MicroBatch:
        """The same with its tensors on `device`; itself where they are there."""
        if self.input_ids.device == device:
            return self
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        moved: dict[str, Any] = {name: value.to(device) for name, value in values if isinstance(value, Tensor)}
        return replace(self, **moved)

    def padded(self, multiple: int) -> MicroBatch:
        """The same with T rounded up to a multiple, by a further sequence that nothing is read from."""
        length = self.input_ids.shape[1]
        missing = -length % multiple
        if not missing:
            return self
        places = torch.arange(missing, device=self.position_ids.device).unsqueeze(0)
        experts = self.experts
        if experts is not None:
            # Any experts will do where nobody looks at the result, but no expert twice.
            experts = torch.cat([experts, experts[-1:].expand(missing, *experts.shape[1:])])
        return replace(
            self,
            input_ids=F.pad(self.input_ids, (0, missing)),
            position_ids=torch.cat([self.position_ids, places], dim=1),
            bounds=np.append(self.bounds, np.int32(length + missing)),
            prefixes=None if self.prefixes is None else np.append(self.prefixes, np.int32(-1)),
            experts=experts,
        )

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
        self.rewards = batch.rewards
        self.versions = batch.versions
        # Streams of a single token each have none.
        self.experts = batch.experts if batch.experts is not None and len(batch.experts) else None
        ends = np.arange(len(batch)) + 1
        if batch.samples is not None:
            ends = np.flatnonzero(np.append(np.diff(batch.samples), 1)) + 1
        self.sample_ends: IntArray = ends
        """[S], of each sample the number of the stream after its last one."""
        self.pictures = None if batch.pictures is None else PackedPictures(batch.pictures)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def inputs(self) -> IntArray:
        """[N], tokens of each sample that are computed: all but the last, but one at least."""
        return np.maximum(self.lengths - 1, 1)

    def prompts(self, samples: IntArray) -> IntArray:
        """Tokens of each before the first sampled one; of a sample without such a token, all but the last."""
        first = np.minimum(self.sampled_starts[samples], max(len(self.places) - 1, 0))
        found = self.places[first] if len(self.places) else np.zeros(len(samples), dtype=np.int64)
        return np.where(self.responses[samples] > 0, found, self.inputs[samples])

    def groups(self, samples: IntArray) -> list[IntArray]:
        """Groups of `samples` whose prompts are equal, two or more of each; to the engine's experts as well."""
        found: dict[bytes, list[int]] = {}
        with_answers = samples[self.responses[samples] > 0]
        for sample, length in zip(with_answers.tolist(), self.prompts(with_answers).tolist(), strict=True):
            start = int(self.starts[sample])
            key = self.tokens[start : start + length].tobytes()
            if self.experts is not None:
                key += self.experts[start - sample : start - sample + length].tobytes()
            found.setdefault(key, []).append(sample)
        return [np.array(group, dtype=np.int64) for group in found.values() if len(group) > 1]

    def micro_batch(self, samples: IntArray, sizes: IntArray | None = None) -> MicroBatch:
        """Inputs for the samples with these indices.

        Args:
            samples: [b].
            sizes: how many of them, one after the other, share one prompt; ones that share none are 1. Default: none.
        """
        if not len(samples):
            return _filler()
        segments = segments_of(samples, self.inputs[samples], self.prompts(samples), sizes)
        sample = np.repeat(segments.samples, segments.lengths)
        bounds = np.append(0, np.cumsum(segments.lengths))
        places = np.arange(bounds[-1]) + np.repeat(segments.places - bounds[:-1], segments.lengths)

        counts = self.responses[samples]
        row = np.repeat(np.arange(len(samples)), counts)
        chosen = self.sampled_of(samples)
        in_sample = self.places[chosen]
        return MicroBatch(
            samples=samples,
            input_ids=torch.from_numpy(self.tokens[self.starts[sample] + places]).unsqueeze(0),
            position_ids=torch.from_numpy(places).unsqueeze(0)
            if self.pictures is None
            else torch.from_numpy(self.pictures.positions(places, self.starts[sample] + places)).unsqueeze(1),
            bounds=bounds.astype(np.int32),
            rows=torch.from_numpy(segments.rows(row, in_sample - 1)),
            labels=torch.from_numpy(self.tokens[self.starts[samples][row] + in_sample]),
            sequences=torch.from_numpy(np.repeat(np.cumsum(counts > 0) - 1, counts)),
            mask=torch.from_numpy(np.arange(max(1, int(counts.max()))) < counts[:, None]),
            rollout_log_probs=torch.from_numpy(self.rollout[chosen]),
            advantages=torch.from_numpy(self.advantages[chosen]),
            versions=torch.from_numpy(self.versions[chosen]),
            prefixes=segments.prefixes,
            experts=None if self.experts is None else self._experts(self.experts, sample, places),
            **({} if self.pictures is None else self.pictures.of(samples)),
        )

    def sampled_of(self, samples: IntArray) -> IntArray:
        """Numbers, among all sampled tokens, of those of some samples, in the order of `MicroBatch.labels`."""
        counts = self.responses[samples]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(self.sampled_starts[samples], counts) + within

    def _experts(self, experts: ExpertArray, sample: IntArray, places: IntArray) -> Tensor:
        """[T, 1, ...] for the tokens at `places` [T] of their samples; any for a sample of one token."""
        # A stream has one row less than tokens.
        rows = (self.starts - np.arange(len(self)))[sample] + places
        chosen = experts[np.minimum(rows, len(experts) - 1)]
        # torch computes little with unsigned 16 bits.
        return torch.from_numpy(chosen if chosen.dtype == np.uint8 else chosen.astype(np.int16)).unsqueeze(1)


class PackedPictures:
    """The pictures of a step's streams, with where each one's patches begin."""

    def __init__(self, pictures: BatchPictures) -> None:
        self._pictures = pictures
        sizes = pictures.grids.prod(axis=1)
        self._parts = np.split(pictures.patches, np.cumsum(sizes)[:-1])
        self._of_stream = np.split(pictures.numbers, np.cumsum(pictures.counts)[:-1])

    def positions(self, places: IntArray, tokens: IntArray) -> IntArray:
        """[4, T] of tokens at `places` in their streams, which are at `tokens` among all tokens."""
        return np.concatenate([places[None], self._pictures.positions[:, tokens]])

    def of(self, samples: IntArray) -> dict[str, Any]:
        """The fields of a micro-batch of these samples; none where they have no pictures."""
        numbers = np.concatenate([self._of_stream[sample] for sample in samples.tolist()])
        if not len(numbers):
            return {}
        distinct, places = np.unique(numbers, return_inverse=True)
        return {
            "patches": torch.from_numpy(np.concatenate([self._parts[number] for number in distinct.tolist()])),
            "grids": torch.from_numpy(self._pictures.grids[distinct]),
            "pictures": tuple(places.tolist()),
        }


def _check(batch: TrainBatch) -> None:
    if not len(batch):
        raise ValueError("the training batch has no samples")
    _check_samples(batch)
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
    if batch.rewards is not None and len(batch.rewards) != len(batch):
        raise ValueError(f"the training batch has {len(batch)} samples but {len(batch.rewards)} rewards")
    if (pictures := batch.pictures) is not None and (
        pictures.positions.shape != (3, total)
        or len(pictures.counts) != len(batch)
        or int(pictures.counts.sum()) != len(pictures.numbers)
        or int(pictures.grids.prod(axis=1).sum()) != len(pictures.patches)
    ):
        raise ValueError("the pictures of the training batch do not fit its streams")
    if batch.experts is not None and len(batch.experts) != total - len(batch):
        raise ValueError(
            f"the training batch has {total - len(batch)} tokens that others follow but experts of {len(batch.experts)}"
        )


def _check_samples(batch: TrainBatch) -> None:
    if batch.samples is None:
        return
    steps = np.diff(batch.samples)
    if len(batch.samples) != len(batch) or batch.samples[0] != 0 or not ((steps == 0) | (steps == 1)).all():
        raise ValueError("the streams of the training batch are not one sample's after the other's")
    if batch.experts is not None or batch.pictures is not None:
        raise ValueError("a sample of the training batch has several streams, and experts or pictures")


def _filler() -> MicroBatch:
    integers = torch.zeros(1, 1, dtype=torch.int64)
    none = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        samples=np.empty(0, dtype=np.int64),
        input_ids=integers,
        position_ids=integers,
        bounds=np.array([0, 1], dtype=np.int32),
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
    """Streams of the whole update, over all ranks: as many as samples, but where an agent opened further ones."""
    imbalance: float = 1.0
    """See `dealing.Plan`."""


def plan_step(packed: PackedBatch, global_batch_size: int | None, dealing: Dealing, part: int) -> list[Update]:
    """Cut a step into optimizer updates of `global_batch_size` samples, in order, and each into the rows of one rank.

    No sample is cut: all its streams are in one update.

    Raises:
        ValueError: the size does not divide the step's samples.
    """
    samples = len(packed.sample_ends)
    size = global_batch_size or samples
    if samples % size:
        raise ValueError(f"training.globalBatchSize: {size} does not divide the step's {samples} samples")
    updates, start = [], 0
    for stop in packed.sample_ends[size - 1 :: size].tolist():
        micro_batches, imbalance = _micro_batches(packed, np.arange(start, stop), dealing, part)
        updates.append(
            Update(
                micro_batches=micro_batches,
                imbalance=imbalance,
                num_tokens=int(packed.responses[start:stop].sum()),
                num_sequences=stop - start,
            )
        )
        start = stop
    return updates


def _micro_batches(
    packed: PackedBatch, samples: IntArray, dealing: Dealing, part: int
) -> tuple[list[MicroBatch], float]:
    lengths = packed.inputs[samples]
    if not dealing.may_share(int(packed.prompts(samples).max())):
        plan = Plan(lengths, dealing.costs(lengths), dealing)
        return [packed.micro_batch(samples[row]) for row in plan.ranks[part]], plan.imbalance
    groups = [group - samples[0] for group in packed.groups(samples)]
    prompts = Prompts(lengths, packed.prompts(samples), packed.responses[samples], groups)
    rows, imbalance = plan_sharing(prompts, dealing, part)
    return [packed.micro_batch(samples[row], sizes) for row, sizes in rows], imbalance
