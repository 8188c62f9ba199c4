"""The ledger of prompts: which were trained on, which were filtered, which are open; each exactly once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rljob_worker.flow.group import Decision

LEDGER_KEYS = {Decision.TRAINED: "consumed", Decision.FILTERED: "filtered", Decision.SKIPPED: "skipped"}
"""Decisions that close a prompt, and their keys in the JSON of a checkpoint."""


class Frontier:
    """Ordinals 0, 1, 2, ... of the data's prompts, each opened once, in order, and closed once, in any order.

    What is remembered grows with the prompts that are open, not with those that are done.
    """

    def __init__(self) -> None:
        self._next = 0
        self._open: set[int] = set()
        self._totals = dict.fromkeys(LEDGER_KEYS, 0)

    @property
    def next(self) -> int:
        """The first ordinal that was never opened."""
        return self._next

    @property
    def open_ordinals(self) -> list[int]:
        """Opened and not closed, in order."""
        return sorted(self._open)

    def open(self, count: int) -> range:
        """Open the next `count` ordinals."""
        if count < 0:
            raise ValueError(f"cannot open {count} prompts")
        opened = range(self._next, self._next + count)
        self._next = opened.stop
        self._open.update(opened)
        return opened

    def close(self, ordinals: Iterable[int], decision: Decision) -> None:
        """Close open ordinals, all or none.

        Raises:
            ValueError: one is not open, or stands twice among them; names it. Nothing is changed then.
        """
        closing: set[int] = set()
        for ordinal in ordinals:
            if ordinal in closing:
                raise ValueError(f"prompt {ordinal} is to be {decision} twice at once")
            if ordinal not in self._open:
                was = "was closed before" if 0 <= ordinal < self._next else "was never opened"
                raise ValueError(f"prompt {ordinal} is to be {decision}, but {was}")
            closing.add(ordinal)
        self._open -= closing
        self._totals[decision] += len(closing)

    def state(self) -> dict[str, Any]:
        """A JSON value for the checkpoint."""
        totals = {LEDGER_KEYS[decision]: count for decision, count in self._totals.items()}
        return {"next": self._next, "open": self.open_ordinals, **totals}

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Frontier:
        """The ledger as it was; ValueError when `state` does not add up."""
        frontier = cls()
        try:
            frontier._next = int(state["next"])
            frontier._open = set(state["open"])
            # Versions that could not leave rows out did not count them.
            frontier._totals = {
                decision: int(state.get(key, 0) if decision is Decision.SKIPPED else state[key])
                for decision, key in LEDGER_KEYS.items()
            }
            opened_once = len(frontier._open) == len(state["open"])
            in_range = all(0 <= ordinal < frontier._next for ordinal in frontier._open)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a ledger of prompts: {error!r}") from error
        accounted = len(frontier._open) + sum(frontier._totals.values())
        if not opened_once or not in_range or accounted != frontier._next or min(frontier._totals.values()) < 0:
            raise ValueError(
                f"a ledger of prompts that does not add up: {frontier._next} opened, {len(state['open'])} open, "
                + ", ".join(f"{count} {LEDGER_KEYS[decision]}" for decision, count in frontier._totals.items())
            )
        return frontier
