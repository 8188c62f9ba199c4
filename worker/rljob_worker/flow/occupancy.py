"""Share of the tail in a generation: the time in which most of the engines' places stand empty. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Occupancy:
    """Counts the time in which any response grows, and of it that in which fewer than half of all places are busy.

    It gets requests and responses in the order in which they are given and come; its caller looks at the clock.

    Attributes:
        engines: how many there are.
        places: sequences that each of them runs at once; what it was given beyond them waits.
        seconds: in which a response grew.
        tail_seconds: of which fewer than half of `engines` x `places` did.
    """

    engines: int
    places: int
    seconds: float = 0.0
    tail_seconds: float = 0.0
    _left: Counter[str] = field(default_factory=Counter)
    _now: float = 0.0

    def given(self, engine: str, requests: int, now: float) -> None:
        """An engine has so many more requests."""
        self._advance(now)
        self._left[engine] += requests

    def came(self, engine: str, responses: int, now: float) -> None:
        """An engine returned so many responses, to their ends or cut."""
        self._advance(now)
        self._left[engine] -= responses

    def lost(self, engine: str, now: float) -> None:
        """An engine is gone, with what it had."""
        self._advance(now)
        del self._left[engine]

    def left(self, engine: str) -> int:
        """Requests that an engine was given and did not return; thread-safe."""
        return self._left[engine]

    @property
    def tail_share(self) -> float:
        """Share of the time of generation, in [0, 1]; 0 where nothing was generated."""
        return self.tail_seconds / self.seconds if self.seconds else 0.0

    def _advance(self, now: float) -> None:
        busy = sum(min(left, self.places) for left in self._left.values())
        if busy:
            self.seconds += now - self._now
            self.tail_seconds += (now - self._now) * (2 * busy < self.engines * self.places)
        self._now = now
