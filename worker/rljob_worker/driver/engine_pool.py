"""Engines on nodes of their own over the loss of some: the others go on, and new ones take their places."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from rljob_worker.driver.groups import EngineGroup, Process
from rljob_worker.driver.phase_calls import PhaseCalls
from rljob_worker.errors import JobError, ProcessDiedError, StopRequested
from rljob_worker.records.event_names import ENGINE_JOINED, ENGINE_LOST

logger = logging.getLogger(__name__)
_AGAIN_SECONDS = 5.0


class EnginePool:
    """Which engines there are.

    The thread that generates notices who is lost, that of the trainers takes in who came, between two rounds of
    generation; threads of its own make new ones meanwhile.

    Args:
        engines: the group that it changes.
        make: makes and starts an engine in the place of one that is lost, and returns it; None when it was stopped.
        on_change: told of each change, with the engine's name.
    """

    def __init__(
        self,
        engines: EngineGroup,
        make: Callable[[Process, threading.Event], Process | None],
        on_change: Callable[..., None],
    ) -> None:
        self._engines, self._make, self._on_change = engines, make, on_change
        self._closing = threading.Event()
        self._arrived: list[Process] = []
        self._lock = threading.Lock()
        self._changed = False

    @property
    def arrived(self) -> list[Process]:
        """Those that have started and take no part yet."""
        with self._lock:
            return list(self._arrived)

    def lose(self, error: ProcessDiedError) -> None:
        """An engine died: the others go on without it, and a new one is made.

        Raises:
            ProcessDiedError: it was the last one, or is no engine.
        """
        name = error.process
        if len(self._engines) == 1:
            raise error
        gone = self._engines.remove(name)
        if gone is None:
            raise error
        self._changed = True
        left = ", ".join(process.name for process in self._engines)
        logger.warning("%s\n%s: without it, until a new one has started", error, left)
        self._on_change(ENGINE_LOST, engine=name, left=len(self._engines))
        threading.Thread(target=self._replace, args=(gone,), name=f"replace-{name}", daemon=True).start()

    def settle(self, calls: PhaseCalls) -> bool:
        """Find out who is there, while none generates; whether they are others than the last time.

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
            logger.info("%s takes part again", process.name)
            self._on_change(ENGINE_JOINED, engine=process.name)
        changed, self._changed = self._changed or bool(arrived), False
        return changed

    def close(self) -> None:
        """Make no more."""
        self._closing.set()

    def _replace(self, gone: Process) -> None:
        while not self._closing.is_set():
            try:
                process = self._make(gone, self._closing)
            except StopRequested:
                return
            except JobError as error:
                logger.warning("%s did not start again, and is made anew: %s", gone.name, error)
                self._closing.wait(_AGAIN_SECONDS)
                continue
            if process is not None:
                with self._lock:
                    self._arrived.append(process)
            return
