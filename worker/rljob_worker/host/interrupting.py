"""Bounds for Python code of others that runs in this process and may never end, or take memory without end."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
_POLL_SECONDS = 0.1


class _OutOfTime(BaseException):
    """No Exception: what runs must not catch it."""


class _OutOfMemory(BaseException):
    """Likewise."""


@dataclass(slots=True)
class _Bounds:
    """Bounds of a running call."""

    end: float
    most_bytes: float
    """By which this process may grow."""
    before: int | None = None
    """Its bytes when the call was first looked at: to ask the kernel takes longer than most calls."""


class _Watch:
    """A thread that interrupts others; one for all, since a thread for each call would take longer than most calls."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: dict[int, _Bounds] = {}
        """By the call's thread."""
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
                held = resident_bytes() if self.running else 0
                for thread, bounds in [*self.running.items()]:
                    if bounds.before is None:
                        bounds.before = held
                    late, large = time.monotonic() > bounds.end, held - bounds.before > bounds.most_bytes
                    if late or large:
                        del self.running[thread]
                        why = _OutOfTime if late else _OutOfMemory
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(why))


_WATCH = _Watch()


def resident_bytes() -> int:
    """Memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def interrupted_after(seconds: float, work: Callable[[], T], most_bytes: float = math.inf) -> T:
    """The result of `work`, which is interrupted between two of its instructions when it takes more.

    Not to be nested. A single call into C ends first.

    Args:
        seconds: that it may take.
        work: what is done.
        most_bytes: by which the memory of this process may grow meanwhile.

    Raises:
        TimeoutError: it took longer.
        MemoryError: the process grew by more.
    """
    thread = threading.get_ident()
    try:
        with _WATCH.lock:
            _WATCH.start()
            _WATCH.running[thread] = _Bounds(time.monotonic() + seconds, most_bytes)
        result = work()
        with _WATCH.lock:
            # From here on nobody interrupts; what was sent before has arrived when the lock is released.
            _WATCH.running.pop(thread, None)
        return result
    except _OutOfMemory:
        raise MemoryError(f"more than {most_bytes / 2**30:g} GiB were taken") from None
    except _OutOfTime:
        raise TimeoutError(f"not done after {seconds:g} s") from None
    finally:
        with _WATCH.lock:
            _WATCH.running.pop(thread, None)
