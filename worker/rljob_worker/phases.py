"""The phase clock: where a step's wall-clock seconds went, in one lane or in several side by side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rljob_api.phases import PHASES, SWITCH_PHASES, WAITS


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Seconds of one step; `phases` are disjoint and `other` is what none of them covers."""

    step_seconds: float
    phases: dict[str, float]
    lanes: Mapping[str, dict[str, float]] = field(default_factory=dict)
    """The phases of what ran beside, by lane: in each they are disjoint too, and sum with its `other` to the step."""

    @property
    def other(self) -> float:
        """Seconds of the step outside every phase."""
        return self.step_seconds - sum(self.phases.values())

    @property
    def switch(self) -> float:
        """Seconds spent on handing the devices over."""
        return sum(self.phases.get(name, 0.0) for name in SWITCH_PHASES)

    def bubble(self, phases: Mapping[str, float]) -> float:
        """Share of the step that a lane with these phases did nothing in."""
        return sum(phases.get(name, 0.0) for name in WAITS) / self.step_seconds if self.step_seconds else 0.0


OnStart = Callable[[str, float], None]


class PhaseClock:
    """Measures phases on the driver's monotonic clock.

    A step begins where the last one ended, so nothing between steps goes unaccounted; phases cannot nest. Steps may end
    in another thread than that which enters the phases.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        on_start: OnStart = lambda name, gap: None,
        *,
        lock: threading.Lock | None = None,
    ) -> None:
        """`on_start` is called with each phase and the seconds since the one before ended; `lock` is that of the clock
        whose lane this is."""
        self._now = now
        self._on_start = on_start
        self._begin = now()
        self._phases: dict[str, float] = {}
        self._counting: tuple[str, float] | None = None
        """The open phase, and from when on its seconds are not in `_phases` yet."""
        self._lock = lock or threading.Lock()
        self._running: tuple[str | None, float] = None, self._begin
        self._beside: dict[str, PhaseClock] = {}

    def lane(self, name: str, on_start: OnStart = lambda name, gap: None) -> PhaseClock:
        """A clock for what runs beside, in a thread of its own; its steps begin and end with this one's."""
        clock = self._beside[name] = PhaseClock(self._now, on_start, lock=self._lock)
        return clock

    @property
    def current(self) -> str | None:
        """The phase that runs."""
        return self._running[0]

    def running(self) -> tuple[str | None, float]:
        """The phase that runs, and for how many seconds; or for how long none has run. Thread-safe."""
        name, since = self._running
        return name, max(0.0, self._now() - since)

    def running_beside(self) -> dict[str, str]:
        """The phases that run in the lanes beside, by lane. Thread-safe."""
        return {name: phase for name, lane in self._lanes() if (phase := lane.current) is not None}

    def restart(self) -> None:
        """Begin the first step now: what came before was start-up."""
        self._begin = self._now()
        self._running = None, self._begin
        with self._lock:
            self._phases, self._counting = {}, None
        for clock in self._beside.values():
            clock.restart()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase; the same name may be entered again within a step and adds up."""
        assert name in PHASES, name
        assert self.current is None, f"phase {name} inside phase {self.current}"
        begun = self._now()
        gap, self._running = begun - self._running[1], (name, begun)
        self._on_start(name, gap)
        with self._lock:
            self._counting = name, self._now()
        try:
            yield
        finally:
            with self._lock:
                ended = self._now()
                self._count(ended)
                self._counting = None
            self._running = None, ended

    def attribute(self, name: str, seconds: float) -> None:
        """Count seconds of the open phase, which have passed in it, as those of another one.

        Of a phase that a step's end has cut in two, no more than has passed since.
        """
        assert name in PHASES, name
        with self._lock:
            self._count(self._now())
            assert self._counting is not None, f"{name}: no phase is open"
            opened = self._counting[0]
            moved = min(seconds, self._phases[opened])
            self._phases[opened] -= moved
            self._phases[name] = self._phases.get(name, 0.0) + moved

    def so_far(self) -> StepTiming:
        """The running step until now, an open phase included."""
        with self._lock:
            now = self._now()
            for clock in (self, *self._beside.values()):
                clock._count(now)
            lanes = {name: dict(lane._phases) for name, lane in self._lanes()}
            return StepTiming(now - self._begin, dict(self._phases), lanes)

    def end_step(self) -> StepTiming:
        """Close the step and begin the next one; what goes on in a lane is cut there."""
        with self._lock:
            now = self._now()
            lanes = {name: lane._take(now) for name, lane in self._lanes()}
            timing = StepTiming(now - self._begin, self._take(now), lanes)
            self._begin = now
            return timing

    def _take(self, now: float) -> dict[str, float]:
        self._count(now)
        phases, self._phases = self._phases, {}
        return phases

    def _count(self, now: float) -> None:
        if self._counting is not None:
            name, since = self._counting
            self._phases[name] = self._phases.get(name, 0.0) + now - since
            self._counting = name, now

    def _lanes(self) -> list[tuple[str, PhaseClock]]:
        return list(self._beside.items())
