"""The jobs that should be looked at: each at most once at a time, with back-off after failures."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable

from rljob_operator.shell.api.resources import JobKey


class Stopped(Exception):
    """The queue gives out nothing more."""


_TURNS = 8
_FIRST, _NEWS, _ROUTINE = range(3)


class WorkQueue:
    """Deduplicating queue. A key that is added while it is worked on is given out again after that, once.

    There are three lines: keys that wait for what others wait behind (`first`), keys that something happened to, and
    keys whose time has come (running jobs are looked at every few seconds). The earlier line goes first, but of eight
    keys at least one is of the second and two are of the third, if there are any.

    Args:
        first: whether a key that something happened to belongs into the first line.
        first_backoff: seconds to wait after the first failure of a key; doubles with each further one.
        longest_backoff: upper limit of that.
    """

    def __init__(
        self,
        first: Callable[[JobKey], bool] = lambda _: False,
        first_backoff: float = 0.5,
        longest_backoff: float = 60.0,
    ) -> None:
        self._is_first = first
        self._first_backoff = first_backoff
        self._longest_backoff = longest_backoff
        self._lines: tuple[deque[JobKey], ...] = (deque(), deque(), deque())
        self._turn = 0
        self._wanted: dict[JobKey, int] = {}
        self._working: set[JobKey] = set()
        self._failures: dict[JobKey, int] = {}
        self._timers: dict[JobKey, asyncio.TimerHandle] = {}
        self._stopped = False
        self._waiters: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return sum(map(len, self._lines))

    def add(self, key: JobKey) -> None:
        """Something happened to the key."""
        self._want(key, _FIRST if self._is_first(key) else _NEWS)

    def add_after(self, key: JobKey, seconds: float | None) -> None:
        """The key should be looked at after so many seconds; replaces an earlier wish of this kind (None: by none)."""
        self._cancel_timer(key)
        if seconds is not None and not self._stopped:
            self._timers[key] = asyncio.get_running_loop().call_later(seconds, self._due, key)

    async def get(self) -> JobKey:
        """Wait for a key; `done` must follow.

        Raises:
            Stopped: `stop` was called.
        """
        while not any(self._lines) and not self._stopped:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake()
                raise
        if self._stopped:
            raise Stopped
        key = self._next()
        del self._wanted[key]
        self._working.add(key)
        return key

    def _next(self) -> JobKey:
        self._turn = (self._turn + 1) % _TURNS
        preferred = {0: _ROUTINE, 2: _NEWS, 4: _ROUTINE}.get(self._turn, _FIRST)
        while True:
            line = next(line for line in (preferred, _FIRST, _NEWS, _ROUTINE) if self._lines[line])
            key = self._lines[line].popleft()
            if line != _FIRST or self._is_first(key):
                return key
            # What it waited for was done meanwhile.
            self._wanted[key] = _NEWS
            self._lines[_NEWS].append(key)

    def done(self, key: JobKey) -> None:
        """The work on the key has ended."""
        self._working.discard(key)
        if key in self._wanted:
            self._offer(key)

    def _want(self, key: JobKey, line: int) -> None:
        before = self._wanted.get(key)
        if self._stopped or (before is not None and before <= line):
            return
        self._wanted[key] = line
        if key in self._working:
            return
        if before is not None:
            self._lines[before].remove(key)
        self._offer(key)

    def failed(self, key: JobKey, at_least: float = 0.0, at_most: float = math.inf) -> float:
        """Have the key looked at again after its back-off; returns that in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        seconds = min(self._first_backoff * 2.0 ** min(failures, 30), self._longest_backoff)
        seconds = max(min(seconds * random.uniform(0.8, 1.2), at_most), at_least)
        self.add_after(key, seconds)
        return seconds

    def succeeded(self, key: JobKey) -> None:
        """The next failure of the key is its first."""
        self._failures.pop(key, None)

    def forget(self, key: JobKey) -> None:
        """The key's job is gone."""
        self._failures.pop(key, None)
        self._cancel_timer(key)

    def stop(self) -> None:
        """Give out nothing more."""
        self._stopped = True
        for key in tuple(self._timers):
            self._cancel_timer(key)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _due(self, key: JobKey) -> None:
        self._timers.pop(key, None)
        self._want(key, _ROUTINE)

    def _cancel_timer(self, key: JobKey) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def _offer(self, key: JobKey) -> None:
        self._lines[self._wanted[key]].append(key)
        self._wake()

    def _wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
