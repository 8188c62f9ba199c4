"""Halves of a run: sampling some steps under the same weights, and training on steps that were sampled."""

from __future__ import annotations

from rljob_api import RLJobSpec, derived
from rljob_api.how_many import how_many
from rljob_worker.checkpoints.half_journal import HalfJournal, check_origin, origin_of, write_half
from rljob_worker.checkpoints.journal import JournalStep
from rljob_worker.checkpoints.reader import Found
from rljob_worker.driver.handover import Handover
from rljob_worker.driver.job import Job, Surroundings
from rljob_worker.driver.learn import learn
from rljob_worker.driver.switch import Switch
from rljob_worker.errors import JobError, StopRequested, UserError
from rljob_worker.rollouts.inputs import Inputs
from rljob_worker.rollouts.step import Step
from rljob_worker.types import StepMetrics


class _HalfLoop(Job[Handover]):
    """One lane, whatever mode the job has: the other half is not there."""

    def __init__(self, given: Surroundings, begins_with: Found | None) -> None:
        spec = given.spec
        super().__init__(given, Handover if derived.divides_devices(spec) else Switch)
        self._begins_with = begins_with
        self._origin = origin_of(spec, begins_with, given.inputs.model_folder, given.inputs.tokenizer)

    def start(self) -> int:
        """Begin with the checkpoint, if one was named, and bring the engines to the trainers' weights."""
        if self._begins_with is not None:
            self.recovery.restore(self._begins_with)
        # What is restored is another run's: a stop request has nothing to save.
        self.recovery.saved_step = self.recovery.recorded_step = self._events.step = self.progress.step
        if self.cluster.trainers:
            self.handover.first()
        return self.progress.step


class SamplingLoop(_HalfLoop):
    """Samples steps, all under the weights that it begins with, and keeps them in the journal.

    Args:
        given: what a job is given.
        begins_with: the checkpoint that it begins with; None: the starting weights, for which no trainer is needed.
        steps: how many.
    """

    def __init__(self, given: Surroundings, begins_with: Found | None, steps: int) -> None:
        super().__init__(given, begins_with)
        self._steps = steps
        self._next_ordinals: dict[int, int] = {}

    def train(self) -> None:
        """Sample, and train nothing; StopRequested when the job was asked to stop before."""
        self.clock.restart()
        for _ in range(self._steps):
            if self.stopping():
                raise StopRequested
            self.sample_step()

    def sample_step(self) -> None:
        """One step's samples, scored and with their advantages; each block is a phase of the step record."""
        clock, step = self.clock, self.rollouts.next_step()
        while self.rollouts.wants_round(step):
            with clock.phase("rollout"):
                self.rollouts.generate(step)
            with clock.phase("reward"):
                self.rollouts.collect_rewards()
                self.rollouts.select(step)
        self.training.set_advantages(step)
        step.trained = [StepMetrics()]
        self.write_samples(step)
        if failed := self._failures.messages().get("journal"):
            raise JobError(f"the journal of step {step.number} cannot be written: {failed}")
        self.describe(step)
        self.advance(step)
        # The weights stay: no step trains.
        self.progress.weight_version = step.weight_version
        self._next_ordinals[step.number] = self._pool.next_ordinal
        write_half(self._records.folder, self._origin, self._next_ordinals)
        self.record(step)

    def end(self) -> str:
        """Nothing: samples alone leave no checkpoint."""
        return ""

    def goal(self) -> str:
        """The line that is printed once all is ready."""
        return f"sampling {how_many(self._steps, 'step')} under {self._origin.weights_named}"

    def done(self) -> str:
        """The line that is printed at the end."""
        return f"{how_many(len(self._next_ordinals), 'step')} sampled, none trained"

    def stopped(self) -> str:
        """Save nothing: the journal has what is done."""
        return f"{how_many(len(self._next_ordinals), 'step is', 'steps are')} in the journal"


def check_half(half: HalfJournal, begins_with: Found | None, spec: RLJobSpec, inputs: Inputs) -> None:
    """Refuse samples that the job cannot train on, before anything is started.

    Args:
        half: the samples.
        begins_with: the checkpoint that training begins with; None: the starting weights.
        spec: the job.
        inputs: its model and tokenizer.

    Raises:
        UserError: they are of other weights, or of another tokenizer or algorithm.
    """
    origin = origin_of(spec, begins_with, inputs.model_folder, inputs.tokenizer)
    check_origin(half, origin, 0 if begins_with is None else begins_with.state.step)


class TrainingLoop(_HalfLoop):
    """Trains on steps that were sampled, and saves a checkpoint at the end.

    Args:
        given: what a job is given.
        begins_with: the checkpoint that it begins with; None: the starting weights.
        half: the samples; `check_half` has looked at them.
    """

    def __init__(self, given: Surroundings, begins_with: Found | None, half: HalfJournal) -> None:
        super().__init__(given, begins_with)
        self._half = half

    def train(self) -> None:
        """Train on each step; StopRequested when the job was asked to stop before."""
        self.clock.restart()
        if isinstance(self.handover, Switch):
            with self.clock.phase("rollout_sleep"):
                self.handover.sleep_engines()
            with self.clock.phase("wake_up"):
                self.handover.wake_trainers()
        for recorded in self._half.steps:
            if self.stopping():
                raise StopRequested
            self.train_step(recorded)

    def train_step(self, recorded: JournalStep) -> None:
        """One step's updates, as in a whole run."""
        step = self.step_of(recorded)
        learn(self.training, self.clock, step, beside=self.write_samples)
        self.describe(step)
        self.require_applied(step)
        self.advance(step)
        if self.recovery.due_checkpoint() or recorded is self._half.steps[-1]:
            with self.clock.phase("checkpoint"):
                self.recovery.save_checkpoint()
        self.record(step)

    def step_of(self, recorded: JournalStep) -> Step:
        """A step as it was before its training; its prompts are drawn, as its sampling drew them."""
        step = Step(recorded.number, self.progress.weight_version, oldest_trained=recorded.oldest_trained)
        while self._pool.next_ordinal < self._half.next_ordinals[recorded.number]:
            self._pool.draw(1)
        try:
            prompts = self._inputs.prompts.prompts_of([one.prompt_uid for one in recorded.groups])
        except ValueError as error:
            raise UserError(f"spec.data: other data than those that were sampled from: {error}") from None
        for group, prompt in zip(recorded.groups, prompts):
            if prompt.environment is None and group.prompt_tokens != prompt.token_ids:
                raise UserError(f"spec.data: prompt {prompt.uid} has other tokens than when it was sampled from")
            self.rollouts.take_recorded(step, group, prompt)
        return step

    def end(self) -> str:
        """Nothing is left to save."""
        return ""

    def goal(self) -> str:
        """The line that is printed once all is ready."""
        return f"training on {how_many(len(self._half.steps), 'step')} of {self._half.path}"

    def done(self) -> str:
        """The line that is printed at the end."""
        return f"trained on {how_many(len(self._half.steps), 'step')} of {self._half.path}"
