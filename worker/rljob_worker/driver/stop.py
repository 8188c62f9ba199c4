"""Stop requests: SIGTERM and Ctrl-C ask the job to save and leave within its grace period."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rljob_api.wire.exit_codes import ExitCode
from rljob_worker.errors import StoppedEarly


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """A block in which there is nothing to save: the first SIGTERM raises `StoppedEarly`, later ones change nothing.

    A handler that was installed inside of the block stays.
    """
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if not asked:
            asked = True
            raise StoppedEarly

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, before)


class StopSignal:
    """Turns SIGTERM and SIGINT into an event; a second SIGINT ends the process at once.

    From the first request on, a watchdog ends the process when the grace period is over: the sender of the signal
    will kill it then anyway, and a clean message is worth more than a silent kill.

    Args:
        grace_seconds: of the job.
        on_overdue: called when the grace period is over, before this process ends.
        last_word: called with why this process ends at once, before it does.
    """

    def __init__(self, grace_seconds: float, on_overdue: Callable[[], None], last_word: Callable[[str], None]) -> None:
        self.requested = threading.Event()
        self.requested_at: float | None = None
        self._grace = grace_seconds
        self._on_overdue, self._last_word = on_overdue, last_word
        self._finished = threading.Event()

    def install(self, *numbers: int) -> None:
        """Take over the process's handlers of these signals (Ray installs its own: call this after ray.init)."""
        for number in numbers or (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def request(self) -> None:
        """Ask for a stop from code."""
        if not self.requested.is_set():
            self.requested_at = time.monotonic()
            self.requested.set()
            threading.Thread(target=self._watch, name="stop-watchdog", daemon=True).start()

    def finished(self) -> None:
        """The stop was obeyed: the watchdog has nothing left to do."""
        self._finished.set()

    def seconds_left(self) -> float:
        """Seconds left of the grace period; infinite where nobody asked for a stop."""
        if self.requested_at is None:
            return math.inf
        return max(0.0, self._grace - (time.monotonic() - self.requested_at))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.requested.is_set():
            try:
                self._last_word("interrupted a second time (Ctrl-C), before the state was saved")
            finally:
                os._exit(ExitCode.FAILED)
        self.request()

    def _watch(self) -> None:
        if self._finished.wait(self._grace):
            return
        why = (
            f"the state was not saved within spec.checkpoint.graceSeconds = {self._grace:g} s; the newest complete "
            "checkpoint is what --resume will use"
        )
        try:
            self._last_word(why)
            self._on_overdue()
        finally:
            print(f"rljob: {why}", file=sys.stderr, flush=True)
            os._exit(ExitCode.FAILED)
