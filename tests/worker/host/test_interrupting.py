"""Code that never ends is interrupted, in whatever thread, and no code that ended is."""

from __future__ import annotations

import contextlib
import itertools
import threading

import pytest

from rljob_worker.host import interrupting
from rljob_worker.host.interrupting import interrupted_after


def _endless() -> None:
    for _ in itertools.count():
        try:
            pass
        except Exception:
            continue


def test_what_does_not_end_is_interrupted() -> None:
    with pytest.raises(TimeoutError, match=r"not done after 0\.05 s"):
        interrupted_after(0.05, _endless)
    caught: list[BaseException] = []

    def other() -> None:
        try:
            interrupted_after(0.05, _endless)
        except TimeoutError as error:
            caught.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(20)
    assert len(caught) == 1


def test_what_takes_memory_without_end_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupting, "_POLL_SECONDS", 0.01)

    def grows() -> None:
        held = []
        while True:
            held.append(b"x" * 2**20)

    with pytest.raises(MemoryError, match=r"more than 0\.0625 GiB"):
        interrupted_after(60.0, grows, 2**26)
    assert interrupted_after(60.0, lambda: 7, 2**26) == 7


def test_what_ends_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interrupted_after(20.0, lambda: 7) == 7
    with pytest.raises(KeyError):
        interrupted_after(20.0, lambda: dict[str, int]()["x"])
    assert not interrupting._WATCH.running


def test_a_call_that_ends_at_its_deadline_gives_a_result_or_an_error_and_nothing_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interrupting, "_POLL_SECONDS", 0.0)
    for _ in range(2000):
        with contextlib.suppress(TimeoutError):
            assert interrupted_after(0.0, lambda: sum(range(50))) == 1225
