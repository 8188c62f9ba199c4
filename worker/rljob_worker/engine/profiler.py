"""Profiles of an engine's generation, one for each of its workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rljob_worker.devices.profiling import ProfileOrder, ProfileResult
from rljob_worker.engine.worker_extension import WorkerExtension

logger = logging.getLogger(__name__)


class EngineProfiler:
    """Profiles the next generation after it was asked to.

    Whatever the profiler does, the generation is done.

    Args:
        call: calls a method of each worker's extension with these arguments; answers by rank.
        workers: how many there are.
    """

    def __init__(self, call: Callable[[str, Sequence[object]], Sequence[Any]], workers: int) -> None:
        self._call = call
        self._workers = workers
        self._order: ProfileOrder | None = None
        self._results: list[ProfileResult] = []

    def ask(self, order: ProfileOrder | None) -> None:
        """Profile the next generation; None: no more. Thread-safe."""
        self._order = order

    def results(self) -> list[ProfileResult]:
        """Results of the orders since the last time; thread-safe."""
        taken, self._results = self._results, []
        return taken

    @contextmanager
    def work(self) -> Iterator[None]:
        """Generate."""
        order, self._order = self._order, None
        if order is None:
            yield
            return
        files = self._files(order.file)
        begun = self._asked(files, WorkerExtension.rljob_begin_profile.__name__, files, order.most_bytes, order.stacks)
        try:
            yield
        finally:
            if begun is not None:
                ended = self._asked(files, WorkerExtension.rljob_end_profile.__name__)
                found = [ProfileResult(*one) for of_worker in ended or () for one in of_worker]
                self._results = [*self._results, *found]

    def _files(self, file: str) -> list[str]:
        """`engine-0.json.gz`, or `engine-0-worker-1.json.gz` where there are several workers."""
        if self._workers == 1:
            return [file]
        path = Path(file)
        stem = path.name.removesuffix(".json.gz")
        return [str(path.with_name(f"{stem}-worker-{rank}.json.gz")) for rank in range(self._workers)]

    def _asked(self, files: Sequence[str], method: str, *arguments: object) -> Sequence[Any] | None:
        try:
            return self._call(method, arguments)
        except Exception as error:
            logger.warning("no profile %s: %s; the run goes on", ", ".join(files), error)
            self._results = [*self._results, *(ProfileResult(file, problem=str(error)) for file in files)]
            return None
