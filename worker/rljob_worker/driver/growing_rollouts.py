"""Rollouts whose steps end before all groups are complete; what becomes of the others is a subclass's matter."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from rljob_api import derived
from rljob_worker.data.tokenizer import decode_responses
from rljob_worker.driver.open_groups import OpenGroup, prompt_tokens
from rljob_worker.driver.rollouts import Rollouts
from rljob_worker.driver.step import Decision, ScoredGroup, Step
from rljob_worker.errors import JobError
from rljob_worker.flow.filters import has_variance
from rljob_worker.flow.partial import chosen
from rljob_worker.rewards.runner import RewardSample
from rljob_worker.rollout.seeds import request_seed
from rljob_worker.types import Cut, Prompt


class GrowingRollouts(Rollouts, ABC):
    """Generates and scores more groups at once than a step trains on.

    Nothing here looks at a clock. Which groups an engine has, and in which of its steps it is cut, follow from the open
    groups alone, so that a step that is repeated after a kill has the same tokens. No group is dropped for its length.
    """

    _named: dict[int, Prompt]
    """The prompts of the open groups, as the running step drew them."""

    @property
    def _at_once(self) -> int:
        return derived.prompts_at_once(self._spec)

    def next_step(self) -> Step:
        """Begin the next step, with what the one before left open."""
        step = super().next_step()
        step.open = {one.group.ordinal: one.at(step.weight_version) for one in self._progress.carried}
        self._named = {}
        return step

    def generate(self, step: Step) -> None:
        """Let groups grow until enough are complete; each goes to its reward as soon as it is."""
        self._draw(step)
        self._go_on(step, *self._division(step))
        step.drafts += self._take_draft_counts()
        step.rounds += 1

    def collect_rewards(self, step: Step) -> None:
        """Wait for the rewards that generation did not hide, filter, and choose once there is enough."""
        results = self._scores()
        for ordinal in step.responses.scored:
            one = step.open[ordinal]
            scores = tuple(next(results) for _ in one.group.episodes)
            step.open[ordinal] = replace(one, results=scores)
        complete = {
            ordinal: self._scored(one, self._named[ordinal]) for ordinal, one in step.open.items() if one.results
        }
        if self._spec.rollout.oversampling is not None:
            for scored in [scored for scored in complete.values() if not has_variance(scored.rewards)]:
                self._take(step, replace(complete.pop(scored.ordinal), decision=Decision.FILTERED))
        step.passed = len(complete)
        wanted = self._spec.rollout.prompts_per_step
        if len(complete) >= wanted:
            for group in chosen([scored.answered.group for scored in complete.values()], wanted):
                self._take(step, complete.pop(group.ordinal))
            self._leave(step, list(complete.values()))
            step.groups.sort(key=lambda scored: scored.ordinal)
            self._set_advantages(step)

    @abstractmethod
    def _room(self, step: Step) -> int:
        """New groups that the coming round has places for."""

    @abstractmethod
    def _division(self, step: Step) -> tuple[Sequence[Sequence[int]], Sequence[Cut]]:
        """For each engine: the groups that go on there, by ordinal, and where it stops."""

    def _leave(self, step: Step, surplus: Sequence[ScoredGroup]) -> None:
        """The step has what it trains on: what is left open, of it `surplus` complete, is the next step's."""

    def _growing(self, step: Step) -> list[OpenGroup]:
        """Groups that this step may wait for."""
        return [one for one in step.open.values() if not one.group.complete]

    def _exhausted(self, step: Step) -> bool:
        """Whether nothing grows, and nothing more may be drawn."""
        return super()._exhausted(step) and not self._growing(step)

    def _take(self, step: Step, scored: ScoredGroup) -> None:
        step.groups.append(scored)
        del step.open[scored.ordinal]

    def _draw(self, step: Step) -> None:
        """The prompts of what was left open, and new ones for the places that are free."""
        carried = {} if step.rounds else dict(step.open)
        most = max(self._most_prompts, self._at_once)
        room = min(self._room(step), most - step.drawn)
        for ordinal, prompt in self._prompts.draw(len(carried) + max(0, room)):
            self._named[ordinal] = prompt
            one = carried.pop(ordinal, None)
            if one is None:
                seed = request_seed(self._spec.seed, step.number, step.drawn, 0)
                samples, version = self._spec.rollout.samples_per_prompt, step.weight_version
                step.open[ordinal] = OpenGroup.begun(ordinal, prompt, samples, seed, version)
                step.drawn += 1
            elif prompt_tokens(one.group) != prompt.token_ids:
                raise JobError(f"checkpoint: the group of prompt {ordinal} ({prompt.uid}) begins with other tokens")
        if carried:
            raise JobError(f"checkpoint: groups of prompts {sorted(carried)} were carried over, which are not open")

    def _go_on(self, step: Step, held: Sequence[Sequence[int]], cuts: Sequence[Cut]) -> None:
        work = [
            [(ordinal, *request) for ordinal in ordinals for request in step.open[ordinal].requests()]
            if cut.quotas
            else []
            for ordinals, cut in zip(held, cuts)
        ]
        parts = [[request for _, _, request in requests] for requests in work]
        step.responses.scored.clear()
        if not any(parts):
            return
        streams = self._engines.generate(parts, self._sampling, step.weight_version, cuts=cuts)
        missing = sum(map(len, parts))
        for engine, of_engine in enumerate(parts):
            step.occupancy.given(engine, len(of_engine), time.monotonic())
        for engine, chunk in self._calls.stream("rollout", streams):
            step.occupancy.came(engine, len(chunk), time.monotonic())
            for index, generation in chunk:
                ordinal, sample, _ = work[engine][index]
                grown = step.open[ordinal].extended(sample, generation, step.weight_version)
                step.open[ordinal] = grown
                missing -= 1
                if grown.group.complete:
                    self._submit(grown)
                    step.responses.scored.append(ordinal)
        if missing:
            raise JobError(f"rollout: the engines did not return {missing} of {sum(map(len, parts))} responses")

    def _submit(self, one: OpenGroup) -> None:
        prompt, generations = self._named[one.group.ordinal], one.generations()
        texts = decode_responses(self._inputs.tokenizer, generations)
        samples = enumerate(zip(generations, texts))
        self._inputs.rewards.submit([RewardSample(prompt, i, generation, text) for i, (generation, text) in samples])
