"""Busy time of one or more workers."""

from __future__ import annotations

import threading
import time


class BusyClock:
    """Wall-clock time during which at least one piece of work was under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._since = self._seconds = 0.0

    def enter(self) -> None:
        """A piece of work begins."""
        with self._lock:
            if self._depth == 0:
                self._since = time.perf_counter()
            self._depth += 1

    def exit(self) -> None:
        """One ends."""
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._seconds += time.perf_counter() - self._since

    __enter__ = enter

    def __exit__(self, *exception: object) -> None:
        self.exit()

    def take(self) -> float:
        """Seconds since the last call, those of work that goes on included."""
        with self._lock:
            now = time.perf_counter()
            if self._depth:
                self._seconds += now - self._since
                self._since = now
            seconds, self._seconds = self._seconds, 0.0
            return seconds
