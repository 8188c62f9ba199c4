"""Messages that responses are put together into while a generation runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest

from rljob_worker.engine.chunks import in_chunks
from rljob_worker.engine.service import OnFinished, OnIdle
from rljob_worker.types import Generation

RESPONSE = Generation(np.array([1]), np.zeros(1, np.float32), "stop")
LONG = 60.0
"""Seconds that no test takes."""


def keys(chunk: list[tuple[int, Generation]]) -> list[int]:
    return [key for key, _ in chunk]


def test_a_steady_stream_of_responses_holds_none_of_them_back() -> None:
    taken, given = threading.Event(), []

    def generate(finished: OnFinished, _idle: OnIdle) -> None:
        while not taken.wait(0.01) and len(given) < 500:
            given.append(len(given))
            finished(given[-1], RESPONSE)

    chunks = in_chunks(generate)
    first = next(chunks)
    taken.set()
    assert len(first) < 500, "it was sent when the stream had ended"
    assert [*keys(first), *chain.from_iterable(map(keys, chunks))] == given


def test_an_engine_without_work_is_waited_for_no_longer() -> None:
    """Else each turn of an episode would cost as much as a response waits for others."""
    taken = threading.Event()

    def generate(finished: OnFinished, idle: OnIdle) -> None:
        for turn in range(3):
            finished(2 * turn, RESPONSE)
            finished(2 * turn + 1, RESPONSE)
            idle()
            assert taken.wait(LONG / 3)
            taken.clear()
        idle()

    found = []
    for chunk in in_chunks(generate, seconds=LONG):
        found.append(keys(chunk))
        taken.set()
    assert found == [[0, 1], [2, 3], [4, 5]]


def test_an_engine_that_takes_requests_says_so_at_first() -> None:
    def generate(finished: OnFinished, idle: OnIdle) -> None:
        idle()
        idle()
        finished(0, RESPONSE)

    assert [keys(chunk) for chunk in in_chunks(generate, seconds=LONG)] == [[], [0]]


@pytest.mark.parametrize("error", [ValueError("a prompt"), KeyboardInterrupt()])
def test_an_error_and_an_end_come_at_once(error: BaseException) -> None:
    def fails(finished: OnFinished, _idle: OnIdle) -> None:
        finished(0, RESPONSE)
        raise error

    def ends(finished: OnFinished, _idle: OnIdle) -> None:
        finished(0, RESPONSE)

    def nothing(_finished: OnFinished, _idle: OnIdle) -> None: ...

    with pytest.raises(type(error)):
        list(in_chunks(fails, seconds=LONG))
    assert [keys(chunk) for chunk in in_chunks(ends, seconds=LONG)] == [[0]]
    none: Callable[[OnFinished, OnIdle], object] = nothing
    assert list(in_chunks(none, seconds=LONG)) == []
