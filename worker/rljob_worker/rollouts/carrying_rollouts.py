"""Rollouts whose groups may outlast a step: begun, carried over, taken up again and trained on, each once."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from rljob_worker.data.tokenizer import decode_responses
from rljob_worker.engine.seeds import request_seed
from rljob_worker.errors import JobError, ProcessDiedError
from rljob_worker.flow import Decision, Group
from rljob_worker.rewards.score_calls import RewardSample
from rljob_worker.rollouts.rollouts import Rollouts
from rljob_worker.rollouts.step import Step
from rljob_worker.types import Cut


class CarryingRollouts(Rollouts, ABC):
    """What all of them do with the groups of the pool. No group is dropped for its length."""

    def next_step(self) -> Step:
        """Begin the next step, with what the one before left open."""
        step = self._begun()
        self._pool.change(lambda one: one.at(step.weight_version))
        return step

    def open_groups(self) -> dict[str, int]:
        """How many grow, wait for their rewards, and can be trained on."""
        return self._pool.counts()

    @abstractmethod
    def _room(self, step: Step) -> int:
        """New groups that there are places for."""

    def _seed(self, step: Step, ordinal: int) -> int:
        """Of the first sample of a group that is begun; the others follow."""
        del ordinal
        return request_seed(self._spec.seed, step.number, step.drawn, 0)

    def _take(self, step: Step, group: Group, decision: Decision = Decision.TRAINED) -> None:
        step.take(group, decision, self._pool.prompt(group.ordinal), self._texts(group))
        self._pool.take(group.ordinal)

    def _draw(self, step: Step) -> None:
        """Begin groups for the places that are free."""
        for ordinal, prompt in self._pool.draw(max(0, self._room(step))):
            samples, version = self._spec.rollout.samples_per_prompt, step.weight_version
            self._pool.put(Group.begun(ordinal, prompt, samples, self._seed(step, ordinal), version))
            step.drawn += 1

    def _grow(
        self, step: Step, held: Sequence[Sequence[int]], cuts: Sequence[Cut] | None = None, *, each: bool = False
    ) -> bool:
        """Generate what is missing of groups, until it is there or each engine has been cut or harvested.

        Args:
            step: has the groups.
            held: for each engine, those that go on there, by ordinal.
            cuts: for each engine, where it stops.
            each: the phase's deadline is that of each chunk of responses.

        Returns:
            Whether one died without which the others go on: what it had and did not return is missing still.
        """
        lost: list[str] = []

        def lose(error: ProcessDiedError) -> None:
            self._engines.on_loss(error)
            lost.append(error.process)
            step.occupancy.lost(error.process, time.monotonic())

        work = [[(ordinal, *one) for ordinal in group for one in self._pool[ordinal].requests()] for group in held]
        parts = [[request for _, _, request in requests] for requests in work]
        if not any(parts):
            return False
        streams = self._engines.generate(parts, self._sampling, step.weight_version, cuts=cuts)
        missing = sum(map(len, parts))
        names = [process.name for process in self._engines]
        for name, of_engine in zip(names, parts):
            step.occupancy.given(name, len(of_engine), time.monotonic())
        for engine, chunk in self._calls.stream("rollout", streams, each=each, lost=lose):
            step.occupancy.came(names[engine], len(chunk), time.monotonic())
            for index, generation in chunk:
                ordinal, sample, _ = work[engine][index]
                grown = self._pool.extend(ordinal, sample, generation, step.weight_version)
                missing -= 1
                if grown.complete:
                    self._submit(grown)
                    step.responses.scored.append(ordinal)
        if missing and not lost:
            raise JobError(f"rollout: the engines did not return {missing} of {sum(map(len, parts))} responses")
        return bool(lost)

    def _submit(self, one: Group) -> None:
        """Begin to score a group that is complete."""
        ordinal, generations = one.ordinal, one.generations()
        prompt, texts = self._pool.prompt(ordinal), decode_responses(self._inputs.tokenizer, generations)
        samples = enumerate(zip(generations, texts))
        self._pool.scoring(ordinal)
        self._inputs.rewards.submit(
            [RewardSample(prompt, i, generation, text, ordinal, one.renewed) for i, (generation, text) in samples]
        )
