"""Time that a thing may take in a test, on a machine that does other things too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_WORK = 2.0
_WAIT = 20.0
"""Seconds of this process on a processor, and on the clock."""


@contextmanager
def at_once() -> Iterator[None]:
    """Fails what works for long, and what waits: for a pipe, a lock or a server's time-out."""
    begun, worked = time.monotonic(), time.process_time()
    yield
    assert time.process_time() - worked < _WORK
    assert time.monotonic() - begun < _WAIT
