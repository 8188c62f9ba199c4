"""The memory saver's state machine: ACTIVE -> PAUSED -> ACTIVE over a backend that really moves the memory."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from rljob_worker.devices.base import Device


class MemorySaverState(StrEnum):
    """State of the memory."""

    ACTIVE = "ACTIVE"
    PAUSED = "PAUSED"
    BROKEN = "BROKEN"
    """Unknown: a step failed and could not be undone. Final; the process is to be replaced."""


class TransitionRefused(RuntimeError):
    """The request is not allowed in the present state; nothing was changed."""


class MemoryShortage(TransitionRefused):
    """Too little free memory to wake up; nothing was changed."""


class MemorySaverBroken(RuntimeError):
    """The memory is neither here nor there; only replacing the process helps."""


@runtime_checkable
class MemorySaverBackend(Protocol):
    """Moves the memory. `pause` and `resume` raise with everything as it was, or raise MemorySaverBroken."""

    @property
    def paused(self) -> bool:
        """Whether the memory is away, as far as the backend itself has recorded."""
        ...

    @property
    def paused_bytes(self) -> int:
        """Bytes that are away; 0 while active."""
        ...

    @property
    def backup_bytes(self) -> int:
        """Bytes of host memory that keep contents; 0 while active."""
        ...

    @property
    def resume_bytes(self) -> int:
        """Free bytes that `resume` needs; 0 while active."""
        ...

    def pause(self) -> None:
        """Give the memory away."""
        ...

    def resume(self) -> None:
        """Take it back."""
        ...


@dataclass(frozen=True, slots=True)
class Transition:
    """Effect of one `pause` or `resume`."""

    state: MemorySaverState
    changed: bool
    """False when the memory saver was in that state already."""
    seconds: float
    moved_bytes: int
    """Bytes given away or taken back."""
    backup_bytes: int
    """Bytes of host memory that hold contents while paused."""


class MemorySaver:
    """Pauses and resumes a backend; safe to call from any thread, one transition at a time.

    Both calls are idempotent. `margin_bytes` must stay free on top of what resuming needs.
    """

    def __init__(self, backend: MemorySaverBackend, device: Device, *, margin_bytes: int = 0) -> None:
        if margin_bytes < 0:
            raise ValueError(f"margin_bytes: {margin_bytes} is negative")
        self._backend = backend
        self._device = device
        self._margin_bytes = margin_bytes
        self._lock = threading.RLock()
        self._state = MemorySaverState.PAUSED if backend.paused else MemorySaverState.ACTIVE
        self._broken_by = ""

    @property
    def state(self) -> MemorySaverState:
        """The present state; waits for a running transition."""
        with self._lock:
            return self._state

    def require(self, state: MemorySaverState, what: str) -> None:
        """TransitionRefused, naming `what` and the present state, unless it is `state`."""
        with self._lock:
            if self._state is not state:
                raise TransitionRefused(f"{what} needs the memory saver {state}; it is {self._described()}")

    def pause(self) -> Transition:
        """Give the memory away, after the device has finished. Errors of the device or backend pass through."""
        with self._lock:
            start = time.perf_counter()
            if not self._begin(MemorySaverState.PAUSED):
                return self._done(False, start, 0, self._backend.backup_bytes)
            self._device.synchronize()
            self._move(MemorySaverState.PAUSED)
            return self._done(True, start, self._backend.paused_bytes, self._backend.backup_bytes)

    def resume(self) -> Transition:
        """Take the memory back; MemoryShortage when less than what is needed and the margin is free."""
        with self._lock:
            start = time.perf_counter()
            if not self._begin(MemorySaverState.ACTIVE):
                return self._done(False, start, 0, 0)
            need, free = self._backend.resume_bytes, self._device.memory_info().free
            if free < need + self._margin_bytes:
                raise MemoryShortage(
                    f"resume needs {need} bytes and a margin of {self._margin_bytes} bytes, but {free} bytes are free; "
                    "the memory saver stays PAUSED: put the rollout engine to sleep first, or lower memoryFraction"
                )
            moved, backup = self._backend.paused_bytes, self._backend.backup_bytes
            self._move(MemorySaverState.ACTIVE)
            return self._done(True, start, moved, backup)

    def _begin(self, goal: MemorySaverState) -> bool:
        if self._state is MemorySaverState.BROKEN:
            verb = "pause" if goal is MemorySaverState.PAUSED else "resume"
            raise MemorySaverBroken(f"{verb} refused: the memory saver is {self._described()}")
        return self._state is not goal

    def _move(self, goal: MemorySaverState) -> None:
        act = self._backend.pause if goal is MemorySaverState.PAUSED else self._backend.resume
        try:
            act()
        except MemorySaverBroken as error:
            self._break(str(error))
            raise
        except BaseException:
            self._state = MemorySaverState.PAUSED if self._backend.paused else MemorySaverState.ACTIVE
            raise
        if self._backend.paused is not (goal is MemorySaverState.PAUSED):
            self._break(f"the backend reported success, but is not {goal}")
            raise MemorySaverBroken(f"the memory saver is {self._described()}")
        self._state = goal

    def _break(self, reason: str) -> None:
        self._state, self._broken_by = MemorySaverState.BROKEN, reason

    def _described(self) -> str:
        return f"{self._state} ({self._broken_by})" if self._broken_by else str(self._state)

    def _done(self, changed: bool, start: float, moved: int, backup: int) -> Transition:
        return Transition(self._state, changed, time.perf_counter() - start, moved, backup)
