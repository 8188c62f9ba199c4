"""Replay: train again, on samples of the journal, and sample a step's own under each version of the weights."""

from __future__ import annotations

from rljob_api import derived
from rljob_worker.checkpoints.journal import JournalStep
from rljob_worker.driver.handover import Handover
from rljob_worker.driver.job import Job, Surroundings
from rljob_worker.driver.learn import learn
from rljob_worker.driver.replay import Comparison, Plan, asked_spans
from rljob_worker.driver.switch import Switch
from rljob_worker.errors import NonFiniteError, StopRequested, UserError
from rljob_worker.rollouts.batch import training_sampling
from rljob_worker.rollouts.policies.whole import contiguous
from rljob_worker.rollouts.step import Step
from rljob_worker.types import Prompt


class ReplayLoop(Job[Handover]):
    """One lane, whatever mode the run had: nothing is to be gained beside another."""

    def __init__(self, given: Surroundings, plan: Plan, comparison: Comparison) -> None:
        super().__init__(given, Handover if derived.divides_devices(given.spec) else Switch)
        self.plan = plan
        self.comparison = comparison

    def train(self) -> None:
        """Go through the plan; StopRequested when the job was asked to stop before its end."""
        for recorded in self.plan.trained:
            if self.stopping():
                raise StopRequested
            with self.clock.phase("rollout"):
                self.sample_again()
            self.turn_to_training()
            self.train_again(recorded)
            self.turn_to_generation()
        with self.clock.phase("rollout"):
            self.sample_again()

    def train_again(self, recorded: JournalStep) -> None:
        """One step's training, on what was sampled then."""
        step = self.step_of(recorded)
        learn(self.training, self.clock, step)
        if not step.applied:
            raise NonFiniteError(step.non_finite_reason())
        self.compare_training(step)
        self.advance(step)

    def start(self) -> int:
        """Continue from the plan's checkpoint, and bring the engines to its weights."""
        if self.plan.begins_with is not None:
            self.recovery.restore(self.plan.begins_with)
        self._keep_nothing()
        self.handover.first()
        return self.plan.start

    def step_of(self, recorded: JournalStep) -> Step:
        """A step as it was before its training."""
        step = Step(recorded.number, recorded.weight_version, oldest_trained=recorded.oldest_trained)
        # The data must be the run's.
        prompts = self._prompts_of(recorded)
        step.groups = list(recorded.groups)
        step.prompts = {group.ordinal: prompt for group, prompt in zip(recorded.groups, prompts, strict=True)}
        return step

    def sample_again(self) -> None:
        """Sample what the weights of now sampled of the step, after what was there before it, and compare."""
        recorded, version, generator = self.plan.step, self.progress.weight_version, self.rollouts.generator
        prompts = self._prompts_of(recorded)
        asked = [asked_spans(one, prompt, version) for one, prompt in zip(recorded.groups, prompts)]
        division = contiguous(range(len(asked)), generator.fleet.engines)
        shares = [[(one, one.request) for place in places for one in asked[place]] for places in division]
        sampling = training_sampling(self.spec, self._inputs.pictures)
        for chunk in generator.responses(shares, sampling, version, generator.occupancy()):
            for one, generation in chunk:
                self.comparison.add(one.where, one.recorded, (generation.token_ids, generation.log_probs))

    def _prompts_of(self, recorded: JournalStep) -> list[Prompt]:
        try:
            return self._inputs.prompts.prompts_of([one.prompt_uid for one in recorded.groups])
        except ValueError as error:
            raise UserError(f"spec.data: other data than the run's: {error}") from None

    def turn_to_training(self) -> None:
        """Devices that are shared are the trainers' from here on."""
        if isinstance(self.handover, Switch):
            self.handover.sleep_engines()
            self.handover.wake_trainers()

    def turn_to_generation(self) -> None:
        """Hand the weights over; devices that are shared are the engines' from here on."""
        if isinstance(self.handover, Switch):
            self.handover.wake_engine_weights()
        with self.clock.phase("update_weights"):
            self.handover.update_weights()
        if isinstance(self.handover, Switch):
            self.handover.sleep_trainers()
            self.handover.wake_engine_kv()

    def compare_training(self, step: Step) -> None:
        """Compare the training of a step with its record."""
        if (record := self.plan.records.get(step.number)) is not None:
            self.comparison.add_metrics(step.number, record.metrics, step.trained[0].metrics)

    def advance(self, step: Step) -> None:
        """The weights are those of the next step; prompts stay as they are, for none is drawn."""
        self.progress.step = step.number
        self.progress.weight_version = step.weight_version + 1
        self._keep_nothing()

    def end(self) -> str:
        """Nothing: a replay leaves no checkpoint."""
        return ""

    def _keep_nothing(self) -> None:
        """A stop request has nothing to save either."""
        self.recovery.saved_step = self.progress.step
