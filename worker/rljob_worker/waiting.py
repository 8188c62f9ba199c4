"""Saying what is waited for, once a wait is long enough for somebody to wonder."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rljob_api.safe_text import visible_line

T = TypeVar("T")
QUIET_SECONDS = 3.0
"""Seconds that a wait may be without a word."""


@contextmanager
def waiting_for(what: str, seconds: float | None = None) -> Iterator[None]:
    """A block that may take long: after `QUIET_SECONDS` a line on standard error says `waiting for WHAT`.

    Args:
        what: with the name of the field, file or host that it hangs on.
        seconds: after which the wait ends, where it does.
    """
    until = "" if seconds is None else f" (at most {seconds:g} s)"
    timer = threading.Timer(QUIET_SECONDS, _say, [f"waiting for {what}{until}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def within(seconds: float, work: Callable[[], T]) -> T:
    """The result of `work`, whose own waits know no deadline; TimeoutError after `seconds`, with `work` left behind."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return found[0]


def _say(sentence: str) -> None:
    print(f"rljob: {visible_line(sentence)}", file=sys.stderr, flush=True)
