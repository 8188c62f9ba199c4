"""An event loop whose clock moves only when everything waits."""

from __future__ import annotations

import asyncio
import selectors
from dataclasses import dataclass
from typing import Any

_LEAST = 1e-6
"""Seconds that pass in any case: to wait for less than a float can tell would last for ever."""


@dataclass
class Clock:
    """Seconds since the life began."""

    now: float = 0.0

    def monotonic(self) -> float:
        """Stands in for the function of `time`."""
        return self.now


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs timers in their order, without waiting for them.

    Args:
        clock: what it moves.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(_Selector(clock))
        self._virtual = clock

    def time(self) -> float:
        """Seconds of the clock."""
        return self._virtual.now


class _Selector(selectors.SelectSelector):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("everything waits, and no timer is set")
        self._clock.now += max(_LEAST, timeout)
        return []
