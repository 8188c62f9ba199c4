"""Steps that are all done or all undone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rljob_worker.memory.states import MemorySaverBroken

Rollback = Callable[[Callable[[], None]], None]
"""Registers how to roll a step back."""


@contextlib.contextmanager
def all_or_nothing(what: str) -> Iterator[Rollback]:
    """Roll the registered steps back, last first, when the block raises, and pass its exception on.

    MemorySaverBroken, naming both causes, when undoing fails too. Register a change that can stay half done before it
    is made, and one that is made at once or not at all after it.
    """
    steps: list[Callable[[], None]] = []
    try:
        yield steps.append
    except BaseException as error:
        try:
            for step in reversed(steps):
                step()
        except BaseException as second:
            raise MemorySaverBroken(f"{what} failed ({error}) and could not be undone ({second})") from error
        if isinstance(error, OSError):
            raise OSError(error.errno, f"{what} failed and was undone: {error.strerror}") from error
        raise
