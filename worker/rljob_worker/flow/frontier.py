"""The ledger of prompts: which were trained on, which were filtered, which are open; each exactly once."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any


class Fate(StrEnum):
    """How a prompt's way ended."""

    CONSUMED = "consumed"
    """It was trained on."""
    FILTERED = "filtered"
    """Its group was set aside by a filter, for ever."""
    SKIPPED = "skipped"
    """Its row was to be left out: no sample of it counts."""


class Frontier:
    """Ordinals 0, 1, 2, ... of the data's prompts, each opened once, in order, and closed once, in any order.

    What is remembered grows with the prompts that are open, not with those that are done: below `low` all are closed.
    """

    def __init__(self) -> None:
        self._next = 0
        self._open: set[int] = set()
        self._totals = dict.fromkeys(Fate, 0)

    @property
    def low(self) -> int:
        """The first ordinal that is not closed: all before it are."""
        return min(self._open, default=self._next)

    @property
    def next(self) -> int:
        """The first ordinal that was never opened."""
        return self._next

    @property
    def open_ordinals(self) -> list[int]:
        """Opened and not closed, in order."""
        return sorted(self._open)

    def total(self, fate: Fate) -> int:
        """How many prompts ended so."""
        return self._totals[fate]

    def open(self, count: int) -> range:
        """Open the next `count` ordinals."""
        if count < 0:
            raise ValueError(f"cannot open {count} prompts")
        opened = range(self._next, self._next + count)
        self._next = opened.stop
        self._open.update(opened)
        return opened

    def close(self, ordinals: Iterable[int], fate: Fate) -> None:
        """Close open ordinals, all or none.

        Raises:
            ValueError: one is not open, or stands twice among them; names it. Nothing is changed then.
        """
        closing: set[int] = set()
        for ordinal in ordinals:
            if ordinal in closing:
                raise ValueError(f"prompt {ordinal} is to be {fate} twice at once")
            if ordinal not in self._open:
                was = "was closed before" if 0 <= ordinal < self._next else "was never opened"
                raise ValueError(f"prompt {ordinal} is to be {fate}, but {was}")
            closing.add(ordinal)
        self._open -= closing
        self._totals[fate] += len(closing)

    def state(self) -> dict[str, Any]:
        """A JSON value for the checkpoint."""
        return {"next": self._next, "open": self.open_ordinals, **{fate.value: n for fate, n in self._totals.items()}}

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Frontier:
        """The ledger as it was; ValueError when `state` does not add up."""
        frontier = cls()
        try:
            frontier._next = int(state["next"])
            frontier._open = set(state["open"])
            # Versions that could not leave rows out did not count them.
            frontier._totals = {fate: int(state[fate.value]) for fate in Fate if fate is not Fate.SKIPPED}
            frontier._totals[Fate.SKIPPED] = int(state.get(Fate.SKIPPED.value, 0))
            opened_once = len(frontier._open) == len(state["open"])
            in_range = all(0 <= ordinal < frontier._next for ordinal in frontier._open)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a ledger of prompts: {error!r}") from error
        accounted = len(frontier._open) + sum(frontier._totals.values())
        if not opened_once or not in_range or accounted != frontier._next or min(frontier._totals.values()) < 0:
            raise ValueError(
                f"a ledger of prompts that does not add up: {frontier._next} opened, {len(state['open'])} open, "
                + ", ".join(f"{count} {fate}" for fate, count in frontier._totals.items())
            )
        return frontier
