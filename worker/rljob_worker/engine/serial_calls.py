"""Calls of an engine's process: one at a time, each as its state allows it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rljob_worker.engine.states import EngineState, next_state

_BUSY_SECONDS = 5.0
_SHUTDOWN_SECONDS = 30.0


class SerialCalls:
    """Calls of which one runs at a time, and the state that they lead to.

    Args:
        kind: names it in errors.

    Attributes:
        state: after the last call.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.state = EngineState.NEW
        self._lock = threading.Lock()
        self._busy = 0.0

    def busy_seconds(self) -> float:
        """Seconds spent in calls since `start`; thread-safe."""
        return self._busy

    @contextmanager
    def _operation(self, name: str) -> Iterator[None]:
        """Serialise, check and change the state, count busy time."""
        if not self._lock.acquire(timeout=_BUSY_SECONDS):
            raise RuntimeError(f"{self._kind}: {name} while another call is running")
        try:
            after = next_state(name, self.state)
            begin = time.perf_counter()
            try:
                yield
            finally:
                self._busy += time.perf_counter() - begin
            self.state = after
        finally:
            self._lock.release()

    @contextmanager
    def _closing(self) -> Iterator[bool]:
        """Wait for the running call, and close for good; gives whether there is something that was started."""
        if not self._lock.acquire(timeout=_SHUTDOWN_SECONDS):
            raise RuntimeError(
                f"{self._kind}: a call is still running {_SHUTDOWN_SECONDS:g} s after shutdown was asked for"
            )
        try:
            started = self.state not in (EngineState.NEW, EngineState.CLOSED)
            self.state = EngineState.CLOSED
            yield started
        finally:
            self._lock.release()
