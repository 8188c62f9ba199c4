"""A job whose trainers and engines have devices of their own: what `loops.lockstep` runs."""

from __future__ import annotations

import threading
from dataclasses import replace

from rljob_worker.driver.engine_lane import EngineLane
from rljob_worker.driver.handover import Handover
from rljob_worker.driver.job import Generation, Job, Surroundings
from rljob_worker.driver.lockstep_rollouts import LockstepRollouts
from rljob_worker.driver.phase_calls import PhaseCalls
from rljob_worker.driver.step import Step
from rljob_worker.errors import StopRequested

ENGINES = "engine"
"""Name of the engines' lane in records and events; the trainers' is the job's own."""
_SHARE_OF_GRACE = 0.5
"""Of `checkpoint.graceSeconds`: how long a batch made ahead is waited for after a stop request. The rest is for the
checkpoint, which has it then; without it the step after is not that of the run that was never stopped."""


class LockstepJob(Job[LockstepRollouts, Handover]):
    """Trainers and engines have a lane of phases each, and meet once a step."""

    def __init__(self, given: Surroundings) -> None:
        spec, cluster, given_up = given.spec, given.cluster, threading.Event()
        clock = given.clock.lane(ENGINES, lambda name: given.events.phase(name, lane=ENGINES))
        self.lane = EngineLane(clock, given.stop, given_up)
        engines = given.calls.beside(given_up, cluster.engines.abort)
        trainers = given.calls.beside(given.stop, cluster.trainers.request_stop, self.lane.check)
        generation = Generation(LockstepRollouts, PhaseCalls(engines, clock, spec.timeouts), given_up)
        super().__init__(replace(given, calls=trainers), generation, Handover)

    def begin_batch(self, step: Step | None) -> None:
        """Have the engines' lane generate and score a step's batch; nothing where there is none to make."""
        if step is None:
            return self.lane.idle()

        def make() -> None:
            with self.lane.clock.phase("rollout"):
                self.rollouts.generate(step)
            with self.lane.clock.phase("reward_wait"):
                self.rollouts.collect_rewards(step)

        return self.lane.begin(make)

    def finish_ahead(self, ahead: Step | None) -> bool:
        """Wait for the batch of the step after, now that this one was trained on; False where a stop ended it.

        A stop signal may reach the scoring processes too: a batch whose rewards have errors since then is given up.
        """
        try:
            self.lane.finish(_SHARE_OF_GRACE * self.spec.checkpoint.grace_seconds)
        except StopRequested:
            return False
        results = [result for scored in ahead.groups for result in scored.results] if ahead is not None else []
        return not (self._stop.is_set() and any(result.error for result in results))

    def advance_to(self, ahead: Step | None, step: Step) -> None:
        """`advance`, with the batch made ahead carried over."""
        step.open = {} if ahead is None else self.rollouts.carry(ahead)
        self.advance(step)

    def _held_out(self) -> dict[str, float]:
        found: dict[str, float] = {}

        def evaluate() -> None:
            with self.lane.clock.phase("eval"):
                found.update(self.rollouts.evaluate())

        self.lane.begin(evaluate)
        self.lane.finish()
        self.lane.release()
        return found
