"""Responses of a generation as a stream of chunks, while it runs in a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum

from rljob_worker.engine.service import OnFinished, OnIdle
from rljob_worker.types import Generation

Chunk = list[tuple[int, Generation]]
"""Responses that finished about the same time, each with the key of its request."""
_CHUNK_SECONDS = 0.005


class _Mark(Enum):
    IDLE = "idle"
    END = "end"


_Finished = queue.SimpleQueue[tuple[int, Generation] | _Mark | BaseException]


def in_chunks(generate: Callable[[OnFinished, OnIdle], object], *, seconds: float = _CHUNK_SECONDS) -> Iterator[Chunk]:
    """Run a generation and yield its responses as they finish.

    An empty chunk comes first where more requests may: from then on they may be submitted.

    Args:
        generate: calls the first of what it is given with each response, the second when more requests may come, and
            when it waits for them with nothing left to generate; what it raises is raised here.
        seconds: for which a response waits for others.
    """
    finished: _Finished = queue.SimpleQueue()

    def run() -> None:
        try:
            generate(lambda key, generation: finished.put((key, generation)), lambda: finished.put(_Mark.IDLE))
            finished.put(_Mark.END)
        except BaseException as error:
            finished.put(error)

    threading.Thread(target=run, name="generate", daemon=True).start()
    yield from _chunks(finished, seconds)


def _chunks(finished: _Finished, seconds: float) -> Iterator[Chunk]:
    """Group what finishes within a short time: one message per response would cost more than it hides.

    The time runs from the first response of a chunk: were it the silence after the last one, responses that come one
    after the other would hold back each other, and a caller that waits for the first would wait for all.
    """
    chunk: Chunk = []
    due, begun = 0.0, False
    while True:
        try:
            item = finished.get(timeout=max(0.0, due - time.monotonic()) if chunk else None)
        except queue.Empty:
            item = _Mark.IDLE
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, tuple):
            due = due if chunk else time.monotonic() + seconds
            chunk.append(item)
        elif chunk or (item is _Mark.IDLE and not begun):
            yield chunk
            chunk, begun = [], True
        if item is _Mark.END:
            return
