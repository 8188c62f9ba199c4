"""Mode `Colocated`: trainers and engines take turns on the same devices."""

from __future__ import annotations

from rljob_api import derived
from rljob_worker.driver.job import Job, Surroundings
from rljob_worker.driver.learn import learn
from rljob_worker.driver.switch import Switch
from rljob_worker.errors import StopRequested
from rljob_worker.rollouts.judging import Judging


class ColocatedLoop(Job[Switch]):
    """All phases are in one lane."""

    def __init__(self, given: Surroundings) -> None:
        super().__init__(given, Switch)
        self.judging = Judging(given.cluster.judges, self._in_phase, given.inputs.rewards, given.records)

    @property
    def switch(self) -> Switch:
        """The turns on the devices."""
        return self.handover

    def train(self) -> None:
        """Run steps until the job is done; StopRequested when it was asked to stop before."""
        if self.due_initial_evaluation():
            self.evaluate_at_start()
        self.complete_restored_step()
        self.clock.restart()
        while not self.finished():
            if self.stopping():
                raise StopRequested
            self.train_step()

    def train_step(self) -> None:
        """One step: generate, score, train, hand the weights over. Each block is a phase of the step record."""
        clock = self.clock
        step = self.rollouts.next_step()

        while self.rollouts.wants_round(step):
            with clock.phase("rollout"):
                self.rollouts.generate(step)
            if self.judging.due():
                self.let_judge()
            with clock.phase("reward"):
                self.rollouts.collect_rewards()
                self.rollouts.select(step)
        if not self.switch.engines_asleep:
            with clock.phase("rollout_sleep"):
                self.switch.sleep_engines()

        with clock.phase("wake_up"):
            self.switch.wake_trainers()
        learn(self.training, clock, step, beside=self.write_samples)
        self.describe(step)
        self.require_applied(step)
        self.advance(step)

        if self.recovery.due_checkpoint():
            with clock.phase("checkpoint"):
                self.recovery.save_checkpoint()
        with clock.phase("rollout_wake_weights"):
            self.switch.wake_engine_weights()
        with clock.phase("update_weights"):
            self.switch.update_weights()
        with clock.phase("sleep"):
            self.switch.sleep_trainers()
        with clock.phase("rollout_wake_kv"):
            self.switch.wake_engine_kv()
        if self.switch.due_probe():
            with clock.phase("update_weights"):
                self.switch.probe_weights()
        if self.due_evaluation():
            with clock.phase("eval"):
                self.evaluate()
        self.record(step)

    def let_judge(self) -> None:
        """The judge scores: on devices of its own, or in the place of the engines, which sleep from here on."""
        clock = self.clock
        if derived.judge_devices_per_node(self.spec):
            with clock.phase("judge"):
                self.judging.score()
            return
        with clock.phase("rollout_sleep"):
            self.switch.sleep_engines()
        with clock.phase("judge_wake"):
            self.judging.wake()
        with clock.phase("judge"):
            self.judging.score()
        with clock.phase("judge_sleep"):
            self.judging.sleep()
