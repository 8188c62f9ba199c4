"""Waiting for actor calls: every wait has a deadline, sees a dead process at once and obeys a stop request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions

from rljob_worker.errors import JobError, PhaseDeadlineError, ProcessDiedError, StopRequested

_SLICE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Call:
    """One running actor call and the process that runs it."""

    process: str
    ref: Any


class Calls:
    """Gathers results of actor calls for the driver.

    Args:
        stop: set when the job was asked to stop.
        last_words: the last log lines of a process, for the error that says it died.
        on_deadline: called with the name of the overdue work before the deadline error is raised.
    """

    def __init__(
        self,
        stop: threading.Event,
        last_words: Callable[[str], str],
        on_deadline: Callable[[str], None],
    ) -> None:
        self._stop = stop
        self._last_words = last_words
        self._on_deadline = on_deadline

    def gather(self, what: str, calls: Sequence[Call], seconds: float, *, stoppable: bool = False) -> list[Any]:
        """Results in the order of `calls`.

        Raises:
            PhaseDeadlineError: not all done after `seconds`.
            ProcessDiedError: a process ended.
            StopRequested: a stop was requested meanwhile and the call may be left (`stoppable`).
            JobError: the call itself failed.
        """
        deadline = time.monotonic() + seconds
        by_ref = {call.ref: call for call in calls}
        results: dict[Any, Any] = {}
        pending = list(by_ref)
        while pending:
            if stoppable and self._stop.is_set():
                raise StopRequested
            left = deadline - time.monotonic()
            if left <= 0:
                self._on_deadline(what)
                late = ", ".join(by_ref[ref].process for ref in pending)
                raise PhaseDeadlineError(f"{what}: {late} not finished after {seconds:g} s (spec.timeouts)")
            done, pending = ray.wait(pending, num_returns=1, timeout=min(left, _SLICE_SECONDS))
            for ref in done:
                results[ref] = self._value(what, by_ref[ref])
        return [results[call.ref] for call in calls]

    def _value(self, what: str, call: Call) -> Any:
        try:
            return ray.get(call.ref)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            if isinstance(cause, JobError | StopRequested):
                raise cause from error
            raise JobError(f"{what}: {call.process}: {type(cause).__name__}: {cause}") from error
        except ray.exceptions.RayActorError as error:
            raise ProcessDiedError(f"{what}: {call.process} died\n{self._last_words(call.process)}") from error
