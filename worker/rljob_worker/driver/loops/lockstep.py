"""Mode `Disaggregated`: trainers and engines side by side on devices of their own, one step apart at most."""

from __future__ import annotations

from rljob_worker.driver.learn import learn
from rljob_worker.driver.loops.lane import LanedLoop
from rljob_worker.errors import StopRequested
from rljob_worker.rollouts.step import Step


class LockstepLoop(LanedLoop):
    """Trainers and engines meet once a step, over whole batches."""

    def train_steps(self) -> None:
        """Run steps until the job is done."""
        while not self.finished():
            if self.stopping():
                raise StopRequested
            self.train_step()

    def train_step(self) -> None:
        """One step: train, while the engines generate for the next one where the staleness allows it; then meet."""
        clock = self.clock
        step = self.rollouts.next_step()
        if not self.rollouts.select(step):
            self.begin_batch(step)
            with clock.phase("batch_wait"):
                self.lane.finish()
                self.rollouts.select(step)
        self.begin_batch(self.rollouts.step_after(step))

        learn(self.training, clock, step, beside=self.write_samples)
        self.describe(step)
        self.require_applied(step)

        with clock.phase("batch_wait"):
            complete = self.finish_ahead()
        if not complete:
            self.rollouts.drop_ahead()
        self.advance(step)
        if not complete:
            raise StopRequested
        if self.recovery.due_checkpoint():
            with clock.phase("checkpoint"):
                self.recovery.save_checkpoint()
        self.hand_over()
        self.record(step)

    def begin_batch(self, step: Step | None) -> None:
        """Have the engines' lane generate and score a step's batch; nothing where there is none to make."""
        if step is None:
            self.lane.idle()
        else:
            self.begin_generation(step, self.rollouts.collect_rewards)

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
