"""The order in which data sources are drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rljob_api.spec import DataSource
from rljob_worker.types import IntArray

_DIGITS = 9


class Mixture:
    """Draws from the source that is furthest behind the share its weight gives it.

    With weights that change, a source's due is the sum of its shares over the draws so far, each by the weights of its
    step. The order follows from the number of draws alone: whatever is interrupted goes on with the same.

    Args:
        sources: to be mixed.
        prompts_per_step: draws that count as a step.
        seed: decides between sources that are equally far behind.
    """

    def __init__(self, sources: Sequence[DataSource], prompts_per_step: int, seed: int) -> None:
        changes = {one.first_step for source in sources for one in source.weights or []} | {0}
        # Draw 0 is the first of step 1.
        self._begins = sorted({max(0, step - 1) * prompts_per_step for step in changes})
        weights = np.array([[_weight(source, begin // prompts_per_step + 1) for source in sources]
                            for begin in self._begins], dtype=np.float64)  # fmt: skip
        self._shares: npt.NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
        self._ties = np.argsort(random_bits(len(sources), seed, "mixing"), kind="stable").argsort()

    def order(self, drawn: Sequence[int], n: int) -> IntArray:
        """The sources of the next draws, [n].

        Args:
            drawn: how often each source was drawn from.
            n: how many.
        """
        counts = np.array(drawn, dtype=np.int64)
        order = np.empty(n, dtype=np.int64)
        for position in range(n):
            number = int(counts.sum()) + 1
            shares, due = self._due(number)
            behind = np.where(shares > 0, np.round(due - counts, _DIGITS), -np.inf)
            order[position] = np.lexsort((self._ties, -behind))[0]
            counts[order[position]] += 1
        return order

    def _due(self, number: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The shares of the last of so many draws, and what each source is due of all of them, [sources]."""
        ends = [*self._begins[1:], number]
        spans = [(begin, min(end, number)) for begin, end in zip(self._begins, ends) if begin < number]
        due = np.zeros(self._shares.shape[1])
        for shares, (begin, end) in zip(self._shares, spans):
            due += shares * (end - begin)
        return self._shares[len(spans) - 1], due


def _weight(source: DataSource, step: int) -> float:
    if source.weights is None:
        return source.weight
    return next(one.value for one in reversed(source.weights) if one.first_step <= step)


def random_bits(n: int, seed: int, *stream: str | int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """`n` random 64-bit values. NumPy keeps a bit generator's raw output the same from version to version."""
    key = xxhash.xxh3_64_intdigest(repr(stream).encode())
    return np.random.PCG64(np.random.SeedSequence([seed, key])).random_raw(n)
