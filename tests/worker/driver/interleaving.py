"""Drivers that take turns at every change or look at the file system, in an order that the test chooses.

Each driver is a thread that waits before each file system call that Python audits (open, rename, mkdir, remove, rmdir,
listdir, scandir) until it is its turn.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

_WAITING = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}
_driver: threading.local = threading.local()
_SECONDS = 60.0


class _Driver(threading.Thread):
    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._turn, self._rests = threading.Semaphore(0), threading.Semaphore(0)
        self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        self.wait()
        _driver.here = self
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error
        _driver.here = None
        self.ended = True
        self._rests.release()

    def wait(self) -> None:
        """Called in the thread: up to the next call, and no further."""
        self._rests.release()
        self._turn.acquire()

    def go_on(self) -> None:
        """Called by the test: let it carry out one call and come to the next."""
        self._turn.release()
        self.rest()

    def rest(self) -> None:
        assert self._rests.acquire(timeout=_SECONDS), "a driver hangs"


def _audit(event: str, _: tuple[Any, ...]) -> None:
    here = getattr(_driver, "here", None)
    if here is not None and event in _WAITING:
        here.wait()


_installed: list[bool] = []


def interleave(
    works: Sequence[Callable[[], Any]],
    choose: Callable[[list[int], int], int],
    look: Callable[[], object] = lambda: None,
) -> list[_Driver]:
    """Carry all out to their ends, one call at a time.

    Args:
        works: one function a driver; what it returns or raises is in its `result` or `error`.
        choose: which of the drivers that have not ended goes on, given those and the number of the call.
        look: called after each call, while all rest.
    """
    if not _installed:
        sys.addaudithook(_audit)
        _installed.append(True)
    drivers = [_Driver(work) for work in works]
    for driver in drivers:
        driver.start()
        driver.rest()
    number = 0
    while alive := [i for i, driver in enumerate(drivers) if not driver.ended]:
        drivers[choose(alive, number)].go_on()
        look()
        number += 1
    for driver in drivers:
        driver.join(_SECONDS)
    return drivers
