"""A job whose engines are one step ahead at most: what `loops.lockstep` runs."""

from __future__ import annotations

from rljob_worker.driver.lanes_job import LanesJob
from rljob_worker.errors import StopRequested
from rljob_worker.rollouts.step import Step


class LockstepJob(LanesJob):
    """Trainers and engines meet once a step, over whole batches."""

    def begin_batch(self, step: Step | None) -> None:
        """Have the engines' lane generate and score a step's batch; nothing where there is none to make."""
        if step is None:
            return self.lane.idle()

        def make() -> None:
            with self.lane.clock.phase("rollout"):
                self.rollouts.generate(step)
            with self.lane.clock.phase("reward_wait"):
                self.rollouts.collect_rewards()

        return self.lane.begin(make)

    def finish_ahead(self) -> bool:
        """Wait for the batch of the step after, now that this one was trained on; False where a stop ended it.

        Without the batch the step after is not that of the run that was never stopped. A stop signal may reach the
        scoring processes too: a batch whose rewards have errors since then is given up.
        """
        try:
            self.lane.finish(self._patience)
        except StopRequested:
            return False
        return not (self._stop.is_set() and self.rollouts.has_errors())
