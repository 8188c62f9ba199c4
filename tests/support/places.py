"""At most two files of tests that start Ray, vLLM or a node are run at once: three starve each other on two cores.

All processes of a user share two places, which are locks on files: the kernel gives back those of a process that was
killed. Files wait in the order in which they came. The node's tests wait for none, as they are the longest
chain, but hold one of the places as soon as it is free.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_FILES = ("first", "second")
_POLL_SECONDS = 0.2


class Places:
    """A plugin of each process.

    Args:
        folder: of the locks; None: this user's.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"rljob-test-places-{os.getuid()}"
        self._held: int | None = None

    # First of all, so that waiting is no part of the time that a test may take.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """Hold a place from the first test of a file that needs one to its last."""
        if self._held is None and item.get_closest_marker("node"):
            self._held = self._take(_FILES[1])
        elif self._held is None and item.get_closest_marker("slow"):
            self._held = self._wait()
        try:
            return (yield)
        finally:
            if nextitem is None or _shares(item) != _shares(nextitem):
                self._leave()

    def _wait(self) -> int:
        """Every file of tests ends: its tests have timeouts."""
        turn = self._open("turn")
        fcntl.flock(turn, fcntl.LOCK_EX)
        try:
            while True:
                for name in _FILES:
                    if (held := self._take(name)) is not None:
                        return held
                time.sleep(_POLL_SECONDS)
        finally:
            _give_back(turn)

    def _take(self, name: str) -> int | None:
        file = self._open(name)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        return file

    def _leave(self) -> None:
        if self._held is not None:
            _give_back(self._held)
            self._held = None

    def _open(self, name: str) -> int:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        return os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)


def _give_back(file: int) -> None:
    # To close it would not do: what was forked meanwhile has it open too.
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _shares(item: pytest.Item) -> str:
    """The part that is the same for tests that keep one place."""
    return "node" if item.get_closest_marker("node") else str(item.path)
