"""Mode `Async`: trainers and engines side by side, each at work all the time; staleness is bounded by admission."""

from __future__ import annotations

from rljob_worker.driver.learn import learn
from rljob_worker.driver.loops.lane import LanedLoop
from rljob_worker.errors import StopRequested
from rljob_worker.rollouts.step import Step


class OverlappedLoop(LanedLoop):
    """Trainers take what is ready; engines stand still only where new weights are handed over."""

    def train_steps(self) -> None:
        """Run steps until the job is done."""
        step = None if self.finished() else self.begin_step()
        while step is not None:
            if self.stopping():
                raise StopRequested
            step = self.train_step(step)

    def train_step(self, step: Step) -> Step | None:
        """Train on what is ready, and stop the engines for the new weights; returns the next step, begun by then."""
        clock = self.clock
        with clock.phase("batch_wait"):
            self.rollouts.take_batch(step, self._lane_works)
        learn(self.training, clock, step, beside=self.write_samples)

        with clock.phase("batch_wait"):
            complete = self.pause(step)
        if not step.applied:
            self.describe(step)
        self.require_applied(step)
        self.advance(step)
        if not complete:
            self.describe(step)
            raise StopRequested
        self.hand_over()
        ahead = None if self.finished() else self.begin_step()
        self.describe(step)
        if self.recovery.due_checkpoint():
            with clock.phase("checkpoint"):
                self.recovery.save_checkpoint()
        self.record(step)
        return ahead

    def begin_step(self) -> Step:
        """Begin the next step: its engines' lane is at work from here on."""
        step = self.rollouts.next_step()
        self.begin_generation(step, self.rollouts.wait_for_rewards)
        return step

    def pause(self, step: Step) -> bool:
        """Bring the engines to a stand, with what they have; False where a stop request ended them before.

        What was generated for the step is lost then: the driver that continues generates it again.
        """
        self.rollouts.pause(step)
        try:
            self.lane.finish(self._patience)
        except StopRequested:
            return False
        finally:
            self.rollouts.leave(step, stopping=self._stop.is_set())
        return True

    def _lane_works(self) -> bool:
        self.lane.check()
        if self._stop.is_set():
            raise StopRequested
        return self.lane.working
