"""A job whose engines generate all the time, through updates of the weights: what `loops.overlapped` runs."""

from __future__ import annotations

from rljob_worker.driver.lanes_job import LanesJob
from rljob_worker.errors import StopRequested
from rljob_worker.rollouts.step import Step


class OverlappedJob(LanesJob):
    """Trainers take what is ready; engines stand still only where new weights are handed over."""

    def begin_step(self) -> Step:
        """Begin the next step: its engines' lane is at work from here on."""
        step = self.rollouts.next_step()

        def make() -> None:
            with self.lane.clock.phase("rollout"):
                self.rollouts.generate(step)
            with self.lane.clock.phase("reward_wait"):
                self.rollouts.wait_for_rewards()

        self.lane.begin(make)
        return step

    def take_batch(self, step: Step) -> None:
        """Wait for the groups that the step trains on; StopRequested when the job was asked to stop."""
        self.rollouts.take_batch(step, self._lane_works)

    def pause(self, step: Step) -> bool:
        """Bring the engines to a stand, with what they have; False where a stop request ended them before.

        What was generated for the step is lost then: whoever continues generates it again.
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
