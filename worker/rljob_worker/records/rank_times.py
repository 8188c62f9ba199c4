"""When each process was at work, on the driver's clock."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

Bounds = tuple[float, float]
"""Unix seconds of a begin and of an end; or the least and the largest value of a difference of clocks."""
_UNKNOWN: Bounds = (-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class RankTime:
    """Work of one process."""

    process: str
    what: str
    """The phase that it was called in, or what the work is called outside of one."""
    begin: float
    end: float
    """Unix seconds by the driver's clock."""


def _narrowed(known: Bounds, driver: Bounds, process: Bounds) -> Bounds:
    """Bounds of the seconds that a process's clock is ahead of the driver's, narrowed by a call.

    A process begins after it was called and ends before the driver sees that it did, which bounds it from both sides
    (D. L. Mills, RFC 5905, section 8, has the same four times).
    """
    least, most = process[1] - driver[1], process[0] - driver[0]
    low, high = max(known[0], least), min(known[1], most)
    # Where they cross, the clock drifts, or was set.
    return (low, high) if low <= high else (least, max(least, most))


def _ahead(bounds: Bounds) -> float:
    """Seconds ahead: 0 as long as it can be right."""
    return min(max(0.0, bounds[0]), bounds[1])


@dataclass(slots=True)
class RankTimes:
    """Begin and end of the calls of a step; thread-safe.

    Processes of other nodes have other clocks: their times are moved into the bounds that the calls themselves give.
    """

    _clocks: dict[str, Bounds] = field(default_factory=dict)
    _work: dict[object, RankTime] = field(default_factory=dict)
    _open: set[object] = field(default_factory=set)
    """Streams that go on."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def streaming(self, calls: Iterable[object]) -> Iterator[None]:
        """Replies of these calls come one by one."""
        streams = set(calls)
        with self._lock:
            self._open |= streams
        try:
            yield
        finally:
            with self._lock:
                self._open -= streams

    def note(self, process: str, what: str, call: object, driver: Bounds, own: Bounds) -> None:
        """Note a reply.

        Args:
            process: that replied.
            what: the work is called.
            call: whose reply it is; a stream has several.
            driver: when it was called, and when the reply was seen.
            own: begin and end by the process's clock.
        """
        with self._lock:
            clock = self._clocks[process] = _narrowed(self._clocks.get(process, _UNKNOWN), driver, own)
            begin, end = (time - _ahead(clock) for time in own)
            known = self._work.get(call)
            self._work[call] = RankTime(process, what, begin if known is None else known.begin, end)

    def take(self) -> list[RankTime]:
        """Work that was noted since the last time, in the order of its first replies.

        A stream that goes on is cut at its last item.
        """
        with self._lock:
            taken = [work for work in self._work.values() if work.end > work.begin]
            self._work = {
                call: replace(work, begin=max(work.begin, work.end))
                for call, work in self._work.items()
                if call in self._open
            }
            return taken
