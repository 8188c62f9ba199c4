"""The jobs that should be looked at: each at most once at a time, with back-off after failures."""

from __future__ import annotations

import asyncio
import random
from collections import deque

from rljob_operator.shell.resources import JobKey


class Stopped(Exception):
    """The queue gives out nothing more."""


_ROUTINE_EVERY = 4


class WorkQueue:
    """Deduplicating queue. A key that is added while it is worked on is given out again after that, once.

    Keys that something happened to come before those whose time has come (running jobs are looked at every few
    seconds): of four keys at least one is of the latter kind, if there are any.

    Args:
        first_backoff: seconds to wait after the first failure of a key; doubles with each further one.
        longest_backoff: upper limit of that.
    """

    def __init__(self, first_backoff: float = 0.5, longest_backoff: float = 60.0) -> None:
        self._first_backoff = first_backoff
        self._longest_backoff = longest_backoff
        self._news: deque[JobKey] = deque()
        self._routine: deque[JobKey] = deque()
        self._turn = 0
        self._wanted: dict[JobKey, deque[JobKey]] = {}
        self._working: set[JobKey] = set()
        self._failures: dict[JobKey, int] = {}
        self._timers: dict[JobKey, asyncio.TimerHandle] = {}
        self._stopped = False
        self._waiters: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._news) + len(self._routine)

    def add(self, key: JobKey) -> None:
        """Something happened to the key."""
        self._want(key, self._news)

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
        while not self._news and not self._routine and not self._stopped:
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
        self._turn = (self._turn + 1) % _ROUTINE_EVERY
        first, second = (self._news, self._routine) if self._turn else (self._routine, self._news)
        return (first or second).popleft()

    def done(self, key: JobKey) -> None:
        """The work on the key has ended."""
        self._working.discard(key)
        if key in self._wanted:
            self._offer(key)

    def _want(self, key: JobKey, line: deque[JobKey]) -> None:
        before = self._wanted.get(key)
        if self._stopped or before is line or before is self._news:
            return
        self._wanted[key] = line
        if key in self._working:
            return
        if before is not None:
            before.remove(key)
        self._offer(key)

    def failed(self, key: JobKey, at_least: float = 0.0) -> float:
        """Have the key looked at again after its back-off; returns that in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        seconds = min(self._first_backoff * 2.0 ** min(failures, 30), self._longest_backoff)
        seconds = max(seconds * random.uniform(0.8, 1.2), at_least)
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
        self._want(key, self._routine)

    def _cancel_timer(self, key: JobKey) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def _offer(self, key: JobKey) -> None:
        self._wanted[key].append(key)
        self._wake()

    def _wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
