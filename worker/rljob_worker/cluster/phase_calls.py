"""Waiting for calls within the deadline of the phase that runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

from rljob_api.spec import TimeoutsSpec
from rljob_worker.cluster.calls import Call, Calls
from rljob_worker.errors import ProcessDiedError
from rljob_worker.phases import PhaseClock

T = TypeVar("T")


class PhaseCalls:
    """`Calls` for what happens in a step: the running phase names the work and gives its deadline."""

    def __init__(self, calls: Calls, clock: PhaseClock, timeouts: TimeoutsSpec) -> None:
        self.calls = calls
        self._clock = clock
        self._timeouts = timeouts

    def phase(self, otherwise: str) -> str:
        """The running phase; before the first step, when none runs, what the work is called instead."""
        return self._clock.current or otherwise

    def deadline(self, phase: str) -> float:
        """Seconds that a phase may take."""
        return self._timeouts.phases.get(phase, self._timeouts.phase_seconds)

    def attribute(self, name: str, of: str, seconds: float) -> None:
        """Count seconds of the running phase as those of another one, where it is `of` that runs."""
        if self._clock.current == of:
            self._clock.attribute(name, seconds)

    def gather(self, otherwise: str, calls: Sequence[Call[T]], *, stoppable: bool = False) -> list[T]:
        """Results in the order of `calls`; errors as `Calls.gather`."""
        phase = self.phase(otherwise)
        return self.calls.gather(phase, calls, self.deadline(phase), stoppable=stoppable)

    def stream(
        self,
        otherwise: str,
        calls: Sequence[Call[T]],
        *,
        each: bool = False,
        lost: Callable[[ProcessDiedError], None] | None = None,
        beside: Callable[[], Collection[int]] | None = None,
    ) -> Iterator[tuple[int, T]]:
        """Items of streaming calls; as `Calls.stream`."""
        phase = self.phase(otherwise)
        return self.calls.stream(phase, calls, self.deadline(phase), each=each, lost=lost, beside=beside)
