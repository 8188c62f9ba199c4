"""Samples of each data-parallel rank, and those that share a row: pure, the same on every rank.

Ranks that exchange experts or gradients wait for one another, at each micro-batch or at the update. So what is made
equal is work, not tokens: attention's part of it grows with the square of a sequence.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rljob_worker.types import IntArray

ROWS_PER_STAGE = 4
"""Micro-batches that a pipeline wants for each of its stages: (stages - 1) / micro-batches of it stands idle."""
FULL_ROW = 2048
"""Tokens below which a row is not halved for a pipeline's sake: smaller products are slower by the token."""
SHARES_OF_MEAN = (0.89, 0.92, 0.95, 1.0, 1.05)
"""Work of a row, in that of the mean row, which is tried for rows beside which no other rank has an outsized one."""


@dataclass(frozen=True, slots=True)
class Dealing:
    """By what samples are dealt out."""

    max_tokens: int
    """Most tokens of a row, unless it is of one sample."""
    parts: int = 1
    """Data-parallel ranks."""
    stages: int = 1
    """Pipeline stages of a rank's model."""
    lockstep: bool = False
    """Whether ranks wait for one another at each row, as those that exchange experts do, not at the update alone."""
    pair_cost: float = 0.0
    """Cost of a token's look at one other, in units of all else that a token costs (`models.cost`)."""
    segment_cost: float | None = None
    """Cost of one more sequence of its own in a row beside its tokens, in the same units (`models.cost`); None:
    samples do not share prompts."""

    def may_share(self, prompt: int) -> bool:
        """Whether samples of a prompt of so many tokens may be less work with the prompt once.

        n samples save the work of n - 1 prompts, and have n + 2 sequences in the place of n.
        """
        return self.segment_cost is not None and float(self.costs(np.array(prompt))) > self.segment_cost

    def costs(self, lengths: IntArray) -> npt.NDArray[np.float64]:
        """Work of sequences of these lengths [N], in units of one token without attention: [N] float64."""
        return lengths + self.pair_cost * lengths.astype(np.float64) ** 2


def deal(costs: npt.NDArray[np.float64], parts: int) -> list[IntArray]:
    """Indices of `costs` [N] for each of `parts`, longest first: each goes to the part that has least so far.

    Graham's rule ("Bounds on multiprocessing timing anomalies", 1969). Ties go to the lower index and part.
    """
    longest_first = np.argsort(-costs, kind="stable")
    if parts == 1:
        return [longest_first]
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0.0, part) for part in range(parts)]
    for index in longest_first.tolist():
        load, part = loads[0]
        shares[part].append(index)
        heapq.heapreplace(loads, (load + float(costs[index]), part))
    return [np.array(share, dtype=np.int64) for share in shares]


def plan_update(lengths: IntArray, dealing: Dealing, part: int) -> list[IntArray]:
    """Rows (indices of `lengths` [N], longest first) of data-parallel rank `part`, those of most work first.

    Every rank gets the same number of rows, empty ones where its samples run out: the fewest that the bound allows.
    """
    return Plan(lengths, dealing.costs(lengths), dealing).ranks[part]


Rows = list[IntArray]


class Plan:
    """Rows of each rank, of what is dealt out as a whole.

    Args:
        lengths: [N] tokens of each.
        costs: [N] work of each.
        dealing: by what.

    Attributes:
        ranks: rows (indices, longest first) of each rank, those of most work first, as many on all of them.
        waited_for: work that all ranks wait for.
    """

    def __init__(self, lengths: IntArray, costs: npt.NDArray[np.float64], dealing: Dealing) -> None:
        self._lengths, self._costs, self._dealing = lengths, costs, dealing
        self.ranks = self._ranks_even()
        if dealing.lockstep:
            self.ranks = min([self.ranks, *self._rows_alike(self.ranks)], key=self._slowest)
        self.waited_for = self._slowest(self.ranks)

    @property
    def imbalance(self) -> float:
        """Work that all ranks wait for, in that of the mean rank: 1 where none waits for another."""
        return self.waited_for * self._dealing.parts / float(self._costs.sum())

    def _ranks_even(self) -> list[Rows]:
        """Rows of each rank: first ranks are dealt equal work, then the rows of each."""
        shares = deal(self._costs, self._dealing.parts)
        tokens = max(int(self._lengths[share].sum()) for share in shares)
        count = max(1, -(-tokens // self._dealing.max_tokens))
        if self._dealing.stages > 1:
            count = max(count, min(ROWS_PER_STAGE * self._dealing.stages, tokens // FULL_ROW))
        while True:
            dealt = [self._rows(share, np.zeros(count)) for share in shares]
            ranks = [self._sorted(rows) for rows in dealt if rows is not None]
            if len(ranks) == len(shares):
                return ranks
            count += 1

    def _rows_alike(self, ranks: list[Rows]) -> Iterator[list[Rows]]:
        """Plans of as many rows, dealt over all ranks at once.

        One sample may be more work than a row is on average. All ranks wait for its row, so their rows beside it are to
        be as much work as the bound allows, and their other rows less: how much less is tried.
        """
        parts, every = self._dealing.parts, np.argsort(-self._costs, kind="stable")
        uneven = max((self._work(rows) for rows in ranks), key=lambda work: float(work[0]))
        mean = float(self._costs.sum()) / (parts * len(uneven))
        for least in SHARES_OF_MEAN:
            dealt = self._rows(every, np.maximum(uneven, least * mean).repeat(parts))
            if dealt is not None:
                yield [self._sorted(dealt[rank::parts]) for rank in range(parts)]

    def _slowest(self, ranks: list[Rows]) -> float:
        """Work of the slowest rank: at each row, added up, or in all."""
        work = np.array([self._work(rows) for rows in ranks])
        return float(work.max(axis=0).sum() if self._dealing.lockstep else work.sum(axis=1).max())

    def _rows(self, samples: IntArray, wanted: npt.NDArray[np.float64]) -> Rows | None:
        """Each sample, longest first, goes to the row that lacks most of the work wanted of it and has room; None where
        there is no such row."""
        if len(wanted) == 1:
            fits = len(samples) < 2 or self._lengths[samples].sum() <= self._dealing.max_tokens
            return [samples] if fits else None
        rows: list[list[int]] = [[] for _ in wanted]
        tokens, loads = np.zeros(len(rows), dtype=np.int64), -wanted
        for index in samples.tolist():
            room = (tokens == 0) | (tokens + self._lengths[index] <= self._dealing.max_tokens)
            row = int(np.where(room, loads, np.inf).argmin())
            if not room[row]:
                return None
            rows[row].append(index)
            tokens[row] += self._lengths[index]
            loads[row] += self._costs[index]
        return [np.array(row, dtype=np.int64) for row in rows]

    def _work(self, rows: Rows) -> npt.NDArray[np.float64]:
        return np.array([self._costs[row].sum() for row in rows])

    def _sorted(self, rows: Rows) -> Rows:
        return sorted(rows, key=lambda row: -float(self._costs[row].sum()))
