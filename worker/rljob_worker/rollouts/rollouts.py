"""Rollouts: groups begin, grow in the engines, go to their rewards, and are taken for a step."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rljob_api import RLJobSpec, derived
from rljob_api.spec import Pace
from rljob_worker.cluster.groups import EngineGroup
from rljob_worker.cluster.phase_calls import PhaseCalls
from rljob_worker.errors import JobError, StopRequested, UserError
from rljob_worker.flow import Decision, Group, GroupPool
from rljob_worker.rollouts.batch import too_few_groups, training_sampling
from rljob_worker.rollouts.evaluation import Answered, HeldOut, evaluation_metrics
from rljob_worker.rollouts.generator import Generator
from rljob_worker.rollouts.growth import Growth
from rljob_worker.rollouts.inputs import Inputs
from rljob_worker.rollouts.policies.base import Policy
from rljob_worker.rollouts.step import Progress, Step
from rljob_worker.rollouts.turns import Beginning
from rljob_worker.types import Prompt

_SLICE_SECONDS = 0.05


class Rollouts:
    """Generates and scores groups; which ones, and which a step trains on, its policy says.

    Two threads may share it: one lets groups grow (`generate`, `wait_for_rewards`), the other takes rewards and groups
    (`take_batch`, `leave`). A group is the former's until it is complete, and the latter's from there on.

    Args:
        spec: the job.
        policy: what it decides.
        engines: all of them.
        calls: waits for them.
        pool: prompts and groups.
        inputs: tokenizer, rewards and held-out prompts.
        progress: how far the job is.
        stop: set when generation is to end early.
    """

    def __init__(
        self,
        spec: RLJobSpec,
        policy: Policy,
        engines: EngineGroup,
        calls: PhaseCalls,
        pool: GroupPool,
        inputs: Inputs,
        progress: Progress,
        stop: threading.Event,
    ) -> None:
        self._spec = spec
        self._policy = policy
        self._pool = pool
        self._progress = progress
        self._stop = stop
        self.generator = Generator(spec, engines, calls)
        self._growth = Growth(
            self.generator,
            calls,
            inputs,
            stop,
            inputs.worlds,
            Pace.TOGETHER if spec.episodes is None else spec.episodes.pace,
        )
        self._held_out = HeldOut(spec, self.generator, self._growth, inputs, stop)
        self._filter = inputs.group_filter
        self._sampling = training_sampling(spec, inputs.pictures)
        self._drawn, self._paused = threading.Event(), threading.Event()
        self._ahead: Step | None = None
        """The last step whose batch was made ahead."""

    # --- a step -------------------------------------------------------------------------------

    def next_step(self) -> Step:
        """Begin the next step, with what the one before left for it.

        Raises:
            JobError: what was carried over cannot be of this step; the checkpoint is another job's or damaged.
        """
        self._drawn.clear()
        self._paused.clear()
        number, version = self._progress.step + 1, self._progress.weight_version
        step, self._ahead = self._ahead, None
        if step is None or step.number != number:
            step = self._step(number, version)
        begun = self._policy.begin(step, self._pool.groups)
        self._pool.update(begun.groups)
        step.long, step.oldest_trained = begun.long, begun.oldest_trained
        step.discarded = list(begun.discarded)
        return step

    def step_after(self, step: Step) -> Step | None:
        """The step whose batch is to be made while `step` trains; None where none is: there is no later step, or
        `staleness.max` is 0."""
        if derived.max_staleness(self._spec) == 0 or step.number >= self._spec.steps:
            return None
        self._ahead = self._step(step.number + 1, step.weight_version + 1)
        return self._ahead

    def drop_ahead(self) -> None:
        """Forget what was made for the step after; its prompts come again."""
        self._ahead = None
        self._pool.update(())

    def wants_round(self, step: Step) -> bool:
        """Whether the step has too few groups to train on; UserError where it may not draw more prompts."""
        if step.of(Decision.TRAINED):
            return False
        if self._policy.exhausted(step, self._pool.groups):
            raise UserError(too_few_groups(step, self._spec.rollout))
        return True

    def generate(self, step: Step) -> None:
        """Begin as many groups as may be, and let groups grow until they are complete, each engine was cut, or `pause`
        was called; each goes to its reward as soon as it is complete.

        Raises:
            JobError: what was carried over cannot be trained on in time: the checkpoint is of a job with another bound.
        """
        self._begin_groups(step, self._policy.room(step, self._pool.groups))
        for one in self._pool.unscored():
            # It was carried over by a run that ended before its rewards came.
            self._growth.submit(self._pool, one)
        self._drawn.set()
        version, each = self._progress.weight_version, self._policy.endless
        while True:
            assignment, lost = self._policy.assign(step, self._pool.groups, self.generator.fleet), list[str]()
            self._growth.grow(
                self._pool,
                assignment,
                self._sampling,
                version,
                step.occupancy,
                each=each,
                lost=lost,
                paused=self._paused.is_set,
            )
            given_back = len(self._growth.turns.take_given_back())
            step.given_back += given_back
            if given_back and not self._paused.is_set():
                self._begin_groups(step, given_back)
                continue
            # What an engine that was lost had returned stays; the rest of it grows in the others.
            if not lost or self._paused.is_set():
                break
        if (times := self._growth.turns.take_times()) is not None:
            step.environments = times if step.environments is None else step.environments + times
        if (drafts := self.generator.take_draft_counts()) is not None:
            step.drafts = drafts if step.drafts is None else step.drafts + drafts
        step.rounds += 1

    def collect_rewards(self) -> None:
        """Wait for the rewards that generation did not hide; StopRequested when the job was asked to stop."""
        self._growth.collect(self._pool)

    def take_recorded(self, step: Step, group: Group, prompt: Prompt) -> None:
        """Let a step train, or not, on a group of a journal, as was decided when it was sampled."""
        assert group.decision is not None
        step.take(self._growth.with_texts(group), group.decision, prompt)

    def select(self, step: Step) -> bool:
        """Take the groups that the step trains on; False where they are not enough yet.

        Raises:
            JobError: environments failed in too many of their episodes.
            RewardError: the job's function does not say what becomes of a group.
            StopRequested: the job was asked to stop before it said so.
        """
        if self._filter is not None:
            for group in self._policy.unasked(self._pool.groups):
                self._pool.decide(
                    group.ordinal, self._filter.keeps(group, self._pool.prompt(group.ordinal), self._stop)
                )
        selection = self._policy.select(step, self._pool.groups)
        decided = (selection.filtered, Decision.FILTERED), (selection.trained, Decision.TRAINED)
        for groups, decision in (*decided, (selection.surplus, Decision.SURPLUS)):
            for group in groups:
                step.take(self._growth.with_texts(group), decision, self._pool.prompt(group.ordinal))
                if decision is not Decision.SURPLUS:
                    self._pool.take(group.ordinal)
        self._growth.turns.check_errors((step.prompts[one.ordinal], one) for one in step.groups)
        step.passed = selection.passed
        if not selection.trained:
            return False
        step.deferred = list(selection.deferred)
        if selection.left is not None:
            self._pool.update(selection.left)
        step.left = tuple(self._pool.groups)
        step.groups.sort(key=lambda group: group.ordinal)
        return True

    def has_errors(self) -> bool:
        """Whether a reward of an open group is that of an error."""
        return any(map(_has_errors, self._pool.groups))

    # --- beside training ----------------------------------------------------------------------

    def wait_for_rewards(self) -> None:
        """Wait until none is outstanding, or `pause` was called; StopRequested when the job was asked to stop."""
        while self._growth.outstanding and not self._paused.wait(_SLICE_SECONDS):
            if self._stop.is_set():
                raise StopRequested

    def take_batch(self, step: Step, working: Callable[[], bool]) -> None:
        """Wait for the groups that the step trains on, and take them.

        Args:
            step: the running one.
            working: whether the engines' lane is at work; may raise what shall end the wait.

        Raises:
            JobError: there can be no such groups.
            RewardError: a reward failed or did not come in time.
        """
        while not self._drawn.wait(_SLICE_SECONDS):
            working()
        while not self.select(step):
            to_come = working() or bool(self._growth.outstanding)
            if not self._growth.receive(self._pool, _SLICE_SECONDS) and not to_come:
                groups = len(self._pool.groups)
                raise JobError(f"step {step.number}: no batch can be made of {groups} groups that are complete")

    def pause(self, step: Step) -> None:
        """Have the engines end what they generate for the step; `generate` returns with what there is."""
        self._paused.set()
        self.generator.harvest(step.weight_version)

    def leave(self, step: Step, *, stopping: bool) -> None:
        """End the step, whose engines stand still: what it leaves open is the next one's.

        Args:
            step: the running one.
            stopping: a stop signal may have ended rewards: groups with errors are scored again by the driver that
                continues.
        """
        if stopping:
            groups = self._pool.groups
            self._pool.update([one.unscored() if _has_errors(one) else one for one in groups])
        else:
            self._growth.receive(self._pool, 0.0)
        step.left = tuple(self._pool.groups)

    # --- what others ask for ------------------------------------------------------------------

    def open_groups(self) -> dict[str, int]:
        """Groups that are open now, by what they wait for, where they may outlast a step; thread-safe."""
        return self._pool.counts() if self._policy.outlasts else {}

    def evaluate(self) -> dict[str, float]:
        """Metrics of the held-out prompts; StopRequested as `answered`."""
        assert self._spec.evaluation is not None
        return evaluation_metrics(self.answered(), self._spec.evaluation)

    def answered(self) -> list[Answered]:
        """The held-out prompts with scored responses; with the same seeds each time, they differ by the weights alone.

        Rewards of training samples come first: the same processes score both.

        Raises:
            StopRequested: the job was asked to stop before it was done.
        """
        while self._growth.outstanding:
            if self._stop.is_set():
                raise StopRequested
            self._growth.receive(self._pool, _SLICE_SECONDS)
        self._growth.receive(self._pool, 0.0)
        return self._held_out.answered(self._progress.weight_version)

    # --- inside -------------------------------------------------------------------------------

    def _step(self, number: int, version: int) -> Step:
        """A step with nothing in it; for a batch that a killed driver made, no environment is asked any more."""
        return Step(number, version, occupancy=self.generator.occupancy(), environments=self._growth.turns.no_times())

    def _begin_groups(self, step: Step, count: int) -> None:
        samples, version = self._spec.rollout.samples_per_prompt, self._progress.weight_version
        beginnings = []
        for ordinal, prompt in self._pool.draw(max(0, count)):
            beginnings.append(Beginning(ordinal, prompt, self._policy.seed(step, ordinal)))
            step.drawn += 1
        self._growth.begin(self._pool, beginnings, samples, version)


def _has_errors(group: Group) -> bool:
    return any(result.error for result in group.results)
