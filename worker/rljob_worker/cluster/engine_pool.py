"""Engines on nodes of their own that come and go: the others go on, and new ones are made in threads of their own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from rljob_worker.cluster.groups import EngineGroup, Process
from rljob_worker.cluster.phase_calls import PhaseCalls
from rljob_worker.errors import JobError, ProcessDiedError, StopRequested
from rljob_worker.records.event_names import ENGINE_JOINED, ENGINE_LEFT, ENGINE_LOST

logger = logging.getLogger(__name__)
_AGAIN_SECONDS = 5.0


class EnginePool:
    """Which engines there are.

    The thread that generates notices who is lost, that of the trainers takes in who came and lets go who is too many,
    between two rounds of generation; threads of its own make new ones meanwhile.

    Args:
        engines: the group that it changes.
        make: makes and starts the engine of a name, and returns it; None when it was stopped.
        end: ends one that nobody needs.
        on_change: told of each change, with the engine's name.
    """

    def __init__(
        self,
        engines: EngineGroup,
        make: Callable[[str, threading.Event], Process | None],
        end: Callable[[Process], None],
        on_change: Callable[..., None],
    ) -> None:
        self._engines, self._make, self._end, self._on_change = engines, make, end, on_change
        self._lock = threading.Lock()
        self._closed = self._changed = False
        self._arrived: list[Process] = []
        self._made: dict[str, threading.Event] = {}
        """Engines that are being made, each with what ends that."""

    @property
    def arrived(self) -> list[Process]:
        """Those that have started and take no part yet."""
        with self._lock:
            return list(self._arrived)

    @property
    def made(self) -> list[str]:
        """Names of those that are being made."""
        with self._lock:
            return list(self._made)

    def lose(self, error: ProcessDiedError) -> None:
        """An engine died: the others go on without it, and a new one is made.

        Raises:
            ProcessDiedError: it was the last one, or is no engine.
        """
        name = error.process
        if len(self._engines) == 1 or self._engines.remove(name) is None:
            raise error
        self._changed = True
        left = ", ".join(process.name for process in self._engines)
        logger.warning("%s\n%s: without it, until a new one has started", error, left)
        self._on_change(ENGINE_LOST, engine=name, left=len(self._engines))
        self.add(name)

    def add(self, name: str) -> None:
        """Make an engine; it takes part when it has started."""
        over = threading.Event()
        with self._lock:
            if self._closed:
                return
            self._made[name] = over
        threading.Thread(target=self._make_one, args=(name, over), name=f"make-{name}", daemon=True).start()

    def let_go(self, name: str) -> None:
        """Do without an engine, whether it takes part, has just come or is being made; while none generates."""
        with self._lock:
            waiting = self._made.pop(name, None)
            came = next((process for process in self._arrived if process.name == name), None)
            self._arrived = [process for process in self._arrived if process is not came]
        if waiting is not None:
            waiting.set()
            return
        gone = came or self._engines.remove(name)
        assert gone is not None, f"{name} is not there"
        if came is None:
            self._changed = True
            logger.info("%s is not needed any more", name)
            self._on_change(ENGINE_LEFT, engine=name, left=len(self._engines))
        self._end(gone)

    def settle(self, calls: PhaseCalls) -> None:
        """Find out who is there, while none generates.

        Raises:
            ProcessDiedError: none is.
        """
        for call in self._engines.locate():
            try:
                calls.gather("update_weights", [call])
            except ProcessDiedError as error:
                self.lose(error)
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for process in arrived:
            self._engines.add(process)
            self._changed = True
            logger.info("%s takes part", process.name)
            self._on_change(ENGINE_JOINED, engine=process.name)

    def take_changed(self) -> bool:
        """Whether those that take part are others than the last time that this was asked."""
        changed, self._changed = self._changed, False
        return changed

    def close(self) -> None:
        """Make no more."""
        with self._lock:
            self._closed = True
            for over in self._made.values():
                over.set()

    def _make_one(self, name: str, over: threading.Event) -> None:
        while not over.is_set():
            try:
                process = self._make(name, over)
            except StopRequested:
                return
            except JobError as error:
                logger.warning("%s did not start, and is made anew: %s", name, error)
                over.wait(_AGAIN_SECONDS)
                continue
            if process is None:
                return
            with self._lock:
                if not over.is_set():
                    del self._made[name]
                    self._arrived.append(process)
                    return
            self._end(process)
