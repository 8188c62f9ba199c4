"""Responses of a generation as a stream of chunks, while it runs in a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from rljob_worker.engine.service import OnFinished
from rljob_worker.types import Generation

Chunk = list[tuple[int, Generation]]
"""Responses that finished together, each with the index of its request."""
_Finished = queue.SimpleQueue[tuple[int, Generation] | BaseException | None]
_CHUNK_SECONDS = 0.05


def in_chunks(generate: Callable[[OnFinished], object]) -> Iterator[Chunk]:
    """Run a generation and yield its responses as they finish.

    Args:
        generate: calls what it is given with each response; what it raises is raised here.
    """
    finished: _Finished = queue.SimpleQueue()

    def run() -> None:
        try:
            generate(lambda index, generation: finished.put((index, generation)))
            finished.put(None)
        except BaseException as error:
            finished.put(error)

    threading.Thread(target=run, name="generate", daemon=True).start()
    yield from _chunks(finished)


def _chunks(finished: _Finished) -> Iterator[Chunk]:
    """Group what finishes within a short time: one message per response would cost more than it hides."""
    chunk: Chunk = []
    while True:
        try:
            item = finished.get(timeout=_CHUNK_SECONDS if chunk else None)
        except queue.Empty:
            yield chunk
            chunk = []
            continue
        if isinstance(item, BaseException):
            raise item
        if item is None:
            break
        chunk.append(item)
    if chunk:
        yield chunk
