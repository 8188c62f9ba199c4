"""Samples that compute their prompt once, and the layout of a row of them: pure, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rljob_worker.trainer.dealing import FULL_ROW, Dealing, Plan
from rljob_worker.types import IntArray

LEAST_GAIN = 1.08
"""Work of samples alone, in that of the same with one prompt, from which the prompt is shared: of 8 samples,
where it has a tenth of a response's tokens."""

SharedRow = tuple[IntArray, IntArray | None]
"""Samples of a row, and how many of them one after the other share one prompt; None: none do."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Facts about an update's N samples."""

    lengths: IntArray
    """[N], tokens of each that are computed."""
    prompts: IntArray
    """[N], those of its prompt."""
    responses: IntArray
    """[N], those that logits are needed for."""
    groups: Sequence[IntArray]
    """Samples that have one prompt, two or more of each."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """Samples that are dealt out as one."""

    samples: IntArray
    tokens: int
    cost: float


def plan_sharing(update: Prompts, dealing: Dealing, part: int) -> tuple[list[SharedRow], float]:
    """Rows of data-parallel rank `part`, as `dealing.plan_update` has them, with shared prompts where these pay; and
    `Plan.imbalance`.

    Groups are whole, or in 2, 4, ... parts each of which shares its prompt: the fewest of those with the least work for
    the slowest rank. Where that is no less than without, nothing is shared, and the rows are those of `plan_update`.
    """
    costs = dealing.costs(update.lengths)
    best = Plan(update.lengths, costs, dealing)
    chosen = None
    pieces, largest = 1, max(map(len, update.groups), default=0)
    while 2 * pieces <= largest:
        units = list(_units(update, dealing, pieces))
        if len(units) < len(update.lengths):
            tokens = np.array([unit.tokens for unit in units])
            plan = Plan(tokens, np.array([unit.cost for unit in units]), dealing)
            if plan.waited_for < best.waited_for:
                best, chosen = plan, units
        if dealing.parts == 1:
            break
        pieces *= 2
    if chosen is None:
        return [(row, None) for row in best.ranks[part]], best.imbalance
    return [_row([chosen[index] for index in row]) for row in best.ranks[part]], best.imbalance


def _row(units: Sequence[_Unit]) -> SharedRow:
    sizes = np.array([len(unit.samples) for unit in units], dtype=np.int64)
    samples = np.concatenate([np.empty(0, dtype=np.int64), *(unit.samples for unit in units)])
    return samples, sizes if (sizes > 1).any() else None


def _units(update: Prompts, dealing: Dealing, pieces: int) -> Iterator[_Unit]:
    """All samples: in each group, `pieces` parts or as many more as the bound on a row asks for, if they pay."""
    costs = dealing.costs(update.lengths)
    room = dealing.max_tokens
    if dealing.stages > 1:
        # A pipeline's rows are to be alike, and `planning` counts on it.
        room = min(room, max(FULL_ROW, int(update.lengths.max())))
    alone = np.ones(len(costs), dtype=bool)
    for group in update.groups:
        longest_first = group[np.argsort(-update.lengths[group], kind="stable")]
        for count in range(pieces, len(group)):
            units = [_unit(update, dealing, longest_first[piece::count]) for piece in range(count)]
            if max(unit.tokens for unit in units) <= room:
                break
        else:
            continue
        for unit in units:
            if len(unit.samples) > 1 and costs[unit.samples].sum() >= LEAST_GAIN * unit.cost:
                alone[unit.samples] = False
                yield unit
    for sample in np.flatnonzero(alone):
        yield _Unit(np.array([sample]), int(update.lengths[sample]), float(costs[sample]))


def _unit(update: Prompts, dealing: Dealing, samples: IntArray) -> _Unit:
    assert dealing.segment_cost is not None
    prompt = int(update.prompts[samples[0]])
    own = (update.lengths[samples] - prompt).astype(np.float64)
    # Without a causal mask, a kernel leaves out no half of the pairs.
    pairs = float(prompt) ** 2 + float((own**2 + 2 * prompt * own).sum())
    tokens = prompt + int(own.sum())
    # The prompt, what is after it, and the look at it from there.
    segments = len(samples) + 2
    cost = tokens + dealing.pair_cost * pairs + dealing.segment_cost * segments
    # Of a prompt shorter than the samples are many, there are more logits than tokens, and they take memory too.
    return _Unit(samples, max(tokens, int(update.responses[samples].sum())), cost)


@dataclass(frozen=True, slots=True)
class Segments:
    """Sources of the parts of a row."""

    samples: IntArray
    """[s], in whose stream each segment is."""
    places: IntArray
    """[s], where it begins there."""
    lengths: IntArray
    """[s], of 1 at least."""
    prefixes: IntArray | None
    """[s] int32, the segment of the prompt before it, or -1; None: all are."""
    own: IntArray
    """[b], where in the row each sample's own part begins."""
    own_places: IntArray
    """[b], and where that is in its stream."""
    prompt: IntArray
    """[b], where in the row the prompt of a sample begins that shares it; any of others."""

    def rows(self, sample: IntArray, places: IntArray) -> IntArray:
        """Places in the row of the tokens at `places` [n] of the streams of samples [n], counted by their order."""
        own = places - self.own_places[sample]
        return np.where(own >= 0, self.own[sample] + own, self.prompt[sample] + places)


def segments_of(samples: IntArray, lengths: IntArray, prompts: IntArray, sizes: IntArray | None) -> Segments:
    """The segments of a row.

    Args:
        samples: [b] indices.
        lengths: [b] tokens of each that are computed.
        prompts: [b] those of its prompt.
        sizes: how many of them, one after the other, share one prompt; None: none do.
    """
    if sizes is None:
        starts, zero = np.cumsum(lengths) - lengths, np.zeros_like(lengths)
        return Segments(samples, zero, lengths, None, starts, zero, zero)
    shared = sizes > 1
    unit = np.repeat(np.arange(len(sizes)), sizes)
    # A unit's prompt is the segment before those of its samples.
    of_prompt = np.cumsum(sizes) - sizes + np.cumsum(shared) - 1
    of_sample = np.arange(len(samples)) + np.cumsum(shared)[unit]
    first = (np.cumsum(sizes) - sizes)[shared]

    places, whose, long = np.zeros((3, len(samples) + len(first)), dtype=np.int64)
    prefixes = np.full(len(whose), -1)
    own_places = np.where(shared[unit], prompts, 0)
    whose[of_sample], places[of_sample], long[of_sample] = samples, own_places, lengths - own_places
    whose[of_prompt[shared]], long[of_prompt[shared]] = samples[first], prompts[first]
    prefixes[of_sample] = np.where(shared, of_prompt, -1)[unit]
    starts = np.cumsum(long) - long

    # Of a response of one token, only the label is left.
    there = long > 0
    number = np.cumsum(there) - 1
    prefixes = np.where(prefixes >= 0, number[prefixes], -1)[there].astype(np.int32)
    prompt = starts[of_prompt[unit]]
    return Segments(whose[there], places[there], long[there], prefixes, starts[of_sample], own_places, prompt)
