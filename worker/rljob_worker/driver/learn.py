"""Learning from a step: advantages of its rewards, its batch to the trainers, and what they report."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from rljob_api import RLJobSpec, derived
from rljob_worker.algorithms import get_algorithm, step_advantages
from rljob_worker.cluster.actor import share
from rljob_worker.cluster.groups import TrainerGroup
from rljob_worker.cluster.phase_calls import PhaseCalls
from rljob_worker.flow import Decision
from rljob_worker.models.pictures import PictureFacts
from rljob_worker.phases import PhaseClock
from rljob_worker.rollouts.batch import train_batch, training_sampling
from rljob_worker.rollouts.kept_tokens import choose, reported
from rljob_worker.rollouts.step import Step
from rljob_worker.trainer.trainer import Trainer
from rljob_worker.types import TrainBatch


class Training:
    """Training of a step.

    Args:
        spec: the job.
        trainers: all of them.
        calls: waits for them.
        pictures: how the model takes them; None: it takes none.
    """

    def __init__(
        self, spec: RLJobSpec, trainers: TrainerGroup, calls: PhaseCalls, pictures: PictureFacts | None = None
    ) -> None:
        self._pictures = pictures
        self._spec = spec
        self._trainers = trainers
        self._calls = calls
        self._algorithm = get_algorithm(spec.algorithm.name)
        self._sampling = training_sampling(spec, pictures)

    @property
    def uses_reference(self) -> bool:
        """Whether a step needs the reference policy's log-probabilities."""
        return self._algorithm.needs_reference(self._spec.algorithm)

    @property
    def uses_teacher(self) -> bool:
        """Whether a step needs what a teacher says of its samples."""
        return self._algorithm.needs_teacher

    @property
    def uses_old_log_probs(self) -> bool:
        """Whether a step needs log-probabilities from before its updates."""
        return self._algorithm.needs_old_log_probs(derived.updates_per_step(self._spec))

    @property
    def uses_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return self._algorithm.needs_critic

    def trains_policy(self, step: Step) -> bool:
        """Whether the step updates the policy: not while its critic warms up."""
        return derived.trains_policy(self._spec, step.number)

    def set_advantages(self, step: Step) -> None:
        """Make advantages of the rewards of what the step trains on; with a critic, what it learns from."""
        groups = step.of(Decision.TRAINED)
        step.by_critic = self.uses_critic
        step.advantages = step_advantages(
            self._algorithm,
            torch.from_numpy(np.concatenate([group.rewards for group in groups])),
            [len(group.results) for group in groups],
            torch.tensor(step.learned_lengths()),
            self._spec.algorithm,
        ).numpy()

    def batch(self, step: Step) -> TrainBatch:
        """Batch that the trainers learn from, for their calls alone (`cluster.actor.share`)."""
        groups = step.of(Decision.TRAINED)
        seen = [step.prompts[group.ordinal].pictures for group in groups] if self._pictures is not None else []
        return share(
            train_batch(
                groups,
                step.advantages,
                step.oldest_trained,
                by_critic=self.uses_critic,
                pictures=seen,
                facts=self._pictures if any(seen) else None,
            )
        )

    def values(self, batch: TrainBatch) -> None:
        """The critic's values, and advantages of them; they stay with the trainers."""
        self._calls.gather("values", self._trainers.call(Trainer.values, batch), stoppable=True)

    def critic_train(self, step: Step, batch: TrainBatch, beside: Callable[[Step], None] | None = None) -> bool:
        """All updates of the critic in the step; `beside` is done with it while the trainers are at work.

        Returns:
            Whether the policy is to be trained too; the step has its report otherwise.
        """
        alone = not self.trains_policy(step)
        calls = self._trainers.call(Trainer.critic_train, batch, alone=alone)
        if beside is not None:
            beside(step)
        step.trained = self._calls.gather("critic_train", calls, stoppable=True)
        return step.applied and not alone

    def ref_log_probs(self, batch: TrainBatch) -> None:
        """Log-probabilities under the starting weights; they stay with the trainers."""
        calls = self._trainers.call(Trainer.ref_log_probs, batch, self._sampling)
        self._calls.gather("ref_log_probs", calls, stoppable=True)

    def teacher_log_probs(self, batch: TrainBatch) -> None:
        """Probabilities under the teacher; they stay with the trainers."""
        calls = self._trainers.call(Trainer.teacher_log_probs, batch, self._sampling)
        self._calls.gather("teacher_log_probs", calls, stoppable=True)

    def log_probs(self, batch: TrainBatch) -> None:
        """Log-probabilities before the updates; they stay with the trainers."""
        calls = self._trainers.call(Trainer.log_probs, batch, self._sampling)
        self._calls.gather("log_probs", calls, stoppable=True)

    def actor_train(self, step: Step, batch: TrainBatch, beside: Callable[[Step], None] | None = None) -> None:
        """All optimizer updates of the step; `beside` is done with it while the trainers are at work."""
        asked = reported(choose(step.groups, self._spec.records, step.number))
        calls = self._trainers.call(Trainer.train, batch, self._sampling, step.weight_version + 1, asked)
        if beside is not None:
            beside(step)
        trained = self._calls.gather("actor_train", calls, stoppable=True)
        # What the critic reported of the same step stays.
        for report, of_critic in zip(trained, step.trained):
            report.metrics.update(of_critic.metrics)
        step.trained = trained


def learn(training: Training, clock: PhaseClock, step: Step, beside: Callable[[Step], None] | None = None) -> None:
    """Train on the groups that a step took. Each block is a phase of the step record.

    Args:
        training: what the trainers do.
        clock: of their lane.
        step: gets its advantages, and what the trainers report.
        beside: done with the step while its updates, the critic's where there is one, are under way.
    """
    training.set_advantages(step)
    batch = training.batch(step)
    if training.uses_critic:
        with clock.phase("values"):
            training.values(batch)
    if training.trains_policy(step):
        if training.uses_reference:
            with clock.phase("ref_log_probs"):
                training.ref_log_probs(batch)
        if training.uses_teacher:
            with clock.phase("teacher_log_probs"):
                training.teacher_log_probs(batch)
        if training.uses_old_log_probs:
            with clock.phase("log_probs"):
                training.log_probs(batch)
    if training.uses_critic:
        with clock.phase("critic_train"):
            if not training.critic_train(step, batch, beside):
                return
        beside = None
    with clock.phase("actor_train"):
        training.actor_train(step, batch, beside)
