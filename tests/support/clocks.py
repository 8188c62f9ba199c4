"""Time that a thing may take in a test, on a machine that does other things too."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WORK = 2.0
_WAIT = 20.0
"""Seconds on a processor, and on the clock."""


class Work:
    """Seconds on a processor; `seconds` is there when the block ends."""

    seconds: float


@contextmanager
def work(clock: Callable[[], float] = time.thread_time) -> Iterator[Work]:
    """Measures what a block computes in this thread; with `time.process_time`, in all threads.

    The collector waits: it would read the objects of all tests that this process ran.
    """
    taken = Work()
    collects = gc.isenabled()
    gc.disable()
    begun = clock()
    try:
        yield taken
    finally:
        taken.seconds = clock() - begun
        if collects:
            gc.enable()


@contextmanager
def at_once() -> Iterator[None]:
    """Fails what works for long, in any thread, and what waits: for a pipe, a lock or a server's time-out."""
    begun = time.monotonic()
    with work(time.process_time) as taken:
        yield
    assert taken.seconds < _WORK
    assert time.monotonic() - begun < _WAIT
