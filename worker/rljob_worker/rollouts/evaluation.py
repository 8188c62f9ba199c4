"""Evaluation of held-out prompts: the generating loop, over groups of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from rljob_api import RLJobSpec
from rljob_api.spec import EvaluationSpec
from rljob_api.spec.rollout import RolloutAssignment
from rljob_worker.data.evaluate import EvaluatedPrompt, aggregate, held_out_settings
from rljob_worker.engine.seeds import request_seed
from rljob_worker.errors import JobError, ProcessDiedError, StopRequested
from rljob_worker.flow import Finish, Group
from rljob_worker.flow.pool import OpenGroups
from rljob_worker.rollouts.batch import evaluation_sampling
from rljob_worker.rollouts.generator import Generator
from rljob_worker.rollouts.growth import Growth
from rljob_worker.rollouts.inputs import Inputs
from rljob_worker.rollouts.policies.whole import in_shares
from rljob_worker.rollouts.turns import Beginning
from rljob_worker.types import Prompt


@dataclass(frozen=True, slots=True)
class Answered:
    """A held-out prompt and its scored responses."""

    prompt: Prompt
    group: Group


class HeldOut:
    """Scores the held-out prompts.

    Args:
        spec: the job.
        generator: the engines.
        growth: the loop.
        inputs: with the held-out prompts.
        stop: set when the job was asked to stop.
    """

    def __init__(
        self, spec: RLJobSpec, generator: Generator, growth: Growth, inputs: Inputs, stop: threading.Event
    ) -> None:
        self._spec = spec
        self._generator = generator
        self._growth = growth
        self._prompts, self._pictures = inputs.evaluation_prompts, inputs.pictures
        self._stop = stop

    def answered(self, version: int) -> list[Answered]:
        """The prompts with scored responses of weights of `version`; StopRequested when the job was asked to stop.

        With the same seeds each time, evaluations differ by the weights alone.
        """
        while True:
            try:
                return self._answered(version)
            except ProcessDiedError as error:
                self._generator.goes_on_without(error)
                # All prompts are answered again by those that are left: what was scored of them goes.
                self._growth.collect(OpenGroups())

    def _answered(self, version: int) -> list[Answered]:
        evaluation = self._spec.evaluation
        assert evaluation is not None
        alike: dict[int, list[Prompt]] = {}
        for prompt in self._prompts:
            alike.setdefault(held_out_settings(evaluation, prompt.source).samples_per_prompt, []).append(prompt)
        scored = [one for samples, prompts in alike.items() for one in self._evaluate(prompts, samples, version)]
        # Those of the next step are its own.
        self._generator.take_draft_counts()
        return scored

    def _evaluate(self, prompts: Sequence[Prompt], samples: int, version: int) -> list[Answered]:
        if self._stop.is_set():
            raise StopRequested
        groups = OpenGroups()
        at_once = self._growth.turns.at_once(prompts, samples)
        numbered = [
            Beginning(place, prompt, request_seed(self._spec.seed, 0, place, 0)) for place, prompt in enumerate(prompts)
        ]
        try:
            for part in batched(numbered, at_once):
                self._grow(groups, part, samples, version)
        finally:
            self._growth.turns.forget(groups)
        self._growth.turns.check_errors((prompts[one.ordinal], one) for one in groups.groups)
        self._growth.collect(groups)
        return [Answered(prompts[group.ordinal], group) for group in groups.groups]

    def _grow(self, groups: OpenGroups, beginnings: Sequence[Beginning], samples: int, version: int) -> None:
        self._growth.begin(groups, beginnings, samples, version)
        growing = [one for one in groups.groups if not one.complete]
        when_free = self._spec.rollout.assignment is RolloutAssignment.WHEN_FREE
        assignment = in_shares(growing, self._generator.fleet, when_free=when_free)
        sampling = evaluation_sampling(self._spec, self._pictures)
        self._growth.grow(groups, assignment, sampling, version, self._generator.occupancy())
        if lost := self._growth.turns.take_given_back():
            raise JobError(
                f"evaluation: the environments of {len(lost)} held-out prompts were lost more often than is tried "
                "again (spec.episodes.retries)"
            )


def evaluation_metrics(answered: Sequence[Answered], evaluation: EvaluationSpec) -> dict[str, float]:
    """Metrics of an evaluation, as `data.evaluate.aggregate` has them."""
    prompts = [
        EvaluatedPrompt(
            one.prompt.source,
            [result.score for result in one.group.results],
            sum(episode.finish is Finish.LENGTH for episode in one.group.episodes),
        )
        for one in answered
    ]
    return aggregate(prompts, evaluation)


def batched(beginnings: Sequence[Beginning], most: int) -> list[Sequence[Beginning]]:
    """Parts of them, one after the other, of so many at most."""
    return [beginnings[start : start + most] for start in range(0, len(beginnings), most)]
