"""A job whose engines are one step ahead at most: what `loops.lockstep` runs."""

from __future__ import annotations

from rljob_worker.driver.job import Surroundings
from rljob_worker.driver.lanes_job import LanesJob
from rljob_worker.errors import StopRequested
from rljob_worker.rollouts.lockstep_rollouts import LockstepRollouts
from rljob_worker.rollouts.step import Step


class LockstepJob(LanesJob[LockstepRollouts]):
    """Trainers and engines meet once a step, over whole batches."""

    def __init__(self, given: Surroundings) -> None:
        super().__init__(given, LockstepRollouts)

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

        Without the batch the step after is not that of the run that was never stopped. A stop signal may reach the
        scoring processes too: a batch whose rewards have errors since then is given up.
        """
        try:
            self.lane.finish(self._patience)
        except StopRequested:
            return False
        results = [result for group in ahead.groups for result in group.results] if ahead is not None else []
        return not (self._stop.is_set() and any(result.error for result in results))

    def advance_to(self, ahead: Step | None, step: Step) -> None:
        """`advance`, with the batch made ahead carried over."""
        if ahead is not None:
            self.rollouts.carry(ahead)
        self.advance(step)
