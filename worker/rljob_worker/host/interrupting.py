"""A deadline for Python code of others that runs in this process and may never end."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_POLL_SECONDS = 0.1


class _OutOfTime(BaseException):
    """No Exception: what runs must not catch it."""


class _Watch:
    """A thread that interrupts others; one for all, since a thread for each call would take longer than most calls."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ends: dict[int, float] = {}
        """When each running call is interrupted, by its thread."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch, unless it does already; the caller holds the lock."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="interrupting", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(_POLL_SECONDS)
            with self.lock:
                late = [thread for thread, end in self.ends.items() if time.monotonic() > end]
                for thread in late:
                    del self.ends[thread]
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_OutOfTime))


_WATCH = _Watch()


def interrupted_after(seconds: float, work: Callable[[], T]) -> T:
    """The result of `work`, which is interrupted between two of its instructions when it takes longer.

    Not to be nested. A single call into C ends first.

    Raises:
        TimeoutError: it took longer.
    """
    thread = threading.get_ident()
    try:
        with _WATCH.lock:
            _WATCH.start()
            _WATCH.ends[thread] = time.monotonic() + seconds
        result = work()
        with _WATCH.lock:
            # From here on nobody interrupts; what was sent before has arrived when the lock is released.
            _WATCH.ends.pop(thread, None)
        return result
    except _OutOfTime:
        raise TimeoutError(f"not done after {seconds:g} s") from None
    finally:
        with _WATCH.lock:
            _WATCH.ends.pop(thread, None)
