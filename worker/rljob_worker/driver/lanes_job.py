"""A job whose trainers and engines have devices of their own, and a lane of phases each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from rljob_api.phases import ENGINE_LANE
from rljob_worker.cluster.phase_calls import PhaseCalls
from rljob_worker.driver.engine_lane import EngineLane
from rljob_worker.driver.handover import Handover
from rljob_worker.driver.job import Generation, Job, Surroundings
from rljob_worker.engine.engine import Engine
from rljob_worker.trainer.trainer import Trainer

_SHARE_OF_GRACE = 0.5
"""Of `checkpoint.graceSeconds`: how long the engines' lane is waited for after a stop request. The rest is for the
checkpoint."""


class LanesJob(Job[Handover]):
    """What the modes with two lanes have in common."""

    def __init__(self, given: Surroundings) -> None:
        spec, cluster, given_up = given.spec, given.cluster, threading.Event()
        clock = given.clock.lane(ENGINE_LANE, lambda name, gap: given.events.phase(name, gap, lane=ENGINE_LANE))
        self.lane = EngineLane(clock, given.stop, given_up)
        engines = given.calls.beside(given_up, lambda: cluster.engines.beside(Engine.abort))
        trainers = given.calls.beside(
            given.stop, lambda: cluster.trainers.beside(Trainer.request_stop), self.lane.check
        )
        generation = Generation(PhaseCalls(engines, clock, spec.timeouts), given_up)
        super().__init__(replace(given, calls=trainers), generation, Handover)

    @property
    def _patience(self) -> float:
        """Seconds that the engines' lane may go on for after a stop request."""
        return _SHARE_OF_GRACE * self.spec.checkpoint.grace_seconds

    def _held_out(self) -> dict[str, float]:
        found: dict[str, float] = {}

        def evaluate() -> None:
            with self.lane.clock.phase("eval"):
                found.update(self.rollouts.evaluate())

        self._in_lane(evaluate)
        return found

    def _in_lane(self, work: Callable[[], None]) -> None:
        """Have the engines' lane do this, and wait for it."""
        self.lane.begin(work)
        self.lane.finish()
        self.lane.release()
