"""Rows that are seeds of an environment: made when they are asked for, none is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from rljob_api.spec import SeedRows
from rljob_worker.data.rows import Row

SEED = "seed"
"""The column with the seed."""


class SeededRows(Sequence[Row]):
    """Row N has the seed `first` + N.

    Args:
        seeds: the first, and how many there are.
    """

    def __init__(self, seeds: SeedRows) -> None:
        self._seeds = range(seeds.first, seeds.first + seeds.count)

    def __len__(self) -> int:
        return len(self._seeds)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [{SEED: seed} for seed in self._seeds[index]]
        return {SEED: self._seeds[index]}
