"""Generation one step ahead at most: a step's batch is whole, and was made by the weights of the step before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rljob_api import derived
from rljob_worker.engine.seeds import request_seed
from rljob_worker.errors import JobError
from rljob_worker.flow import Decision, Group
from rljob_worker.rollouts.rollouts import Rollouts
from rljob_worker.rollouts.step import Step


class LockstepRollouts(Rollouts):
    """Generates and scores whole batches, for the running step or for the one after it.

    A batch made ahead is carried over in the pool and taken up from there in every run, so that a checkpoint
    has it and a resumed run trains on the same bits.
    """

    _ahead: Step | None = None
    """The last step whose batch was made ahead; a checkpoint has the batch, and not how it was made."""

    def next_step(self) -> Step:
        """Begin the next step: with its batch, where that was made ahead.

        Raises:
            JobError: what was carried over is no batch for this step; the checkpoint is another job's or damaged.
        """
        step, carried = self._begun(), self._pool.groups
        if not carried:
            return step
        self._check(step, carried)
        if self._ahead is not None and self._ahead.number == step.number:
            step.occupancy, step.drafts = self._ahead.occupancy, self._ahead.drafts
        for one in carried:
            self._pool.take(one.ordinal)
            step.take(one, Decision.TRAINED, self._pool.prompt(one.ordinal), self._texts(one))
        step.drawn, step.rounds, step.passed = len(carried), 1, len(carried)
        self._set_advantages(step)
        return step

    def step_after(self, step: Step) -> Step | None:
        """The step whose batch is to be made while `step` trains; None where none is: there is no later step, or
        `staleness.max` is 0."""
        if derived.max_staleness(self._spec) == 0 or step.number >= self._spec.steps:
            return None
        self._ahead = Step(step.number + 1, step.weight_version + 1, occupancy=self._occupancy())
        return self._ahead

    def carry(self, ahead: Step) -> None:
        """Put a batch made ahead into the pool."""
        for place, group in enumerate(ahead.groups):
            seed = request_seed(self._spec.seed, ahead.number, place, 0)
            self._pool.put(replace(group, seed=seed, decision=None))

    def _check(self, step: Step, carried: Sequence[Group]) -> None:
        """The batch is whole, and within the bound."""
        wanted, most = self._spec.rollout.prompts_per_step, derived.max_staleness(self._spec)
        if len(carried) != wanted or not all(one.complete for one in carried):
            raise JobError(f"checkpoint: {len(carried)} groups were carried over, not {wanted} complete ones")
        for one in carried:
            if (lag := one.lag(step.weight_version)) > most:
                raise JobError(
                    f"rollout: the group of prompt {one.ordinal} has tokens of weights "
                    f"{one.oldest_version}, {lag} updates before the {step.weight_version} of step "
                    f"{step.number}; spec.rollout.staleness.max is {most}"
                )
