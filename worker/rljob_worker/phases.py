"""The phase clock: where a step's wall-clock seconds went."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rljob_api.phases import PHASES, SWITCH_PHASES


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Seconds of one step; `phases` are disjoint and `other` is what none of them covers."""

    step_seconds: float
    phases: dict[str, float]

    @property
    def other(self) -> float:
        """Seconds of the step outside every phase."""
        return self.step_seconds - sum(self.phases.values())

    @property
    def switch(self) -> float:
        """Seconds spent on handing the devices over."""
        return sum(self.phases.get(name, 0.0) for name in SWITCH_PHASES)


class PhaseClock:
    """Measures phases on the driver's monotonic clock.

    A step begins where the last one ended, so nothing between steps goes unaccounted; phases cannot nest.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        on_start: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._now = now
        self._on_start = on_start
        self._begin = now()
        self._phases: dict[str, float] = {}
        self._phase_begin = self._begin
        self._running: tuple[str | None, float] = None, self._begin

    @property
    def current(self) -> str | None:
        """The phase that runs."""
        return self._running[0]

    def running(self) -> tuple[str | None, float]:
        """The phase that runs, and for how many seconds; or for how long none has run. Thread-safe."""
        name, since = self._running
        return name, max(0.0, self._now() - since)

    def restart(self) -> None:
        """Begin the first step now: what came before was start-up."""
        self._begin = self._now()
        self._running = None, self._begin
        self._phases = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase; the same name may be entered again within a step and adds up."""
        assert name in PHASES, name
        assert self.current is None, f"phase {name} inside phase {self.current}"
        self._running = name, self._now()
        self._on_start(name)
        self._phase_begin = self._now()
        try:
            yield
        finally:
            ended = self._now()
            self._phases[name] = self._phases.get(name, 0.0) + ended - self._phase_begin
            self._running = None, ended

    def so_far(self) -> StepTiming:
        """The running step until now, an open phase included."""
        now, phases = self._now(), dict(self._phases)
        if self.current is not None:
            phases[self.current] = phases.get(self.current, 0.0) + now - self._phase_begin
        return StepTiming(now - self._begin, phases)

    def end_step(self) -> StepTiming:
        """Close the step and begin the next one."""
        now = self._now()
        timing = StepTiming(now - self._begin, self._phases)
        self._begin = now
        self._phases = {}
        return timing
