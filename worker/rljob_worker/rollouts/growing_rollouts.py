"""Rollouts whose steps end before all groups are complete; what becomes of the others is a subclass's matter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from rljob_api import derived
from rljob_worker.flow import Decision, Group
from rljob_worker.flow.filters import has_variance
from rljob_worker.flow.partial import chosen
from rljob_worker.rollouts.carrying_rollouts import CarryingRollouts
from rljob_worker.rollouts.step import Step
from rljob_worker.types import Cut


class GrowingRollouts(CarryingRollouts, ABC):
    """Generates and scores more groups at once than a step trains on.

    Nothing here looks at a clock. Which groups an engine has, and in which of its steps it is cut, follow from the open
    groups alone, so that a step that is repeated after a kill has the same tokens.
    """

    @property
    def _at_once(self) -> int:
        return derived.prompts_at_once(self._spec)

    def generate(self, step: Step) -> None:
        """Let groups grow until enough are complete; each goes to its reward as soon as it is."""
        self._draw(step)
        held, cuts = self._division(step)
        step.responses.scored.clear()
        self._grow(step, [ordinals if cut.quotas else [] for ordinals, cut in zip(held, cuts)], cuts)
        step.drafts += self._take_draft_counts()
        step.rounds += 1

    def collect_rewards(self, step: Step) -> None:
        """Wait for the rewards that generation did not hide, filter, and choose once there is enough."""
        results = self._scores()
        for ordinal in step.responses.scored:
            for episode in self._pool[ordinal].episodes:
                self._pool.score(ordinal, episode.sample, next(results), renewed=self._pool[ordinal].renewed)
        complete = {one.ordinal: one for one in self._pool.groups if one.results}
        if self._spec.rollout.oversampling is not None:
            for group in [group for group in complete.values() if not has_variance(group.rewards)]:
                self._take(step, complete.pop(group.ordinal), Decision.FILTERED)
        step.passed = len(complete)
        wanted = self._spec.rollout.prompts_per_step
        if len(complete) >= wanted:
            for group in chosen(list(complete.values()), wanted):
                self._take(step, complete.pop(group.ordinal))
            self._leave(step, list(complete.values()))
            step.left = tuple(self._pool.groups)
            step.groups.sort(key=lambda group: group.ordinal)
            self._set_advantages(step)

    @abstractmethod
    def _division(self, step: Step) -> tuple[Sequence[Sequence[int]], Sequence[Cut]]:
        """For each engine: the groups that go on there, by ordinal, and where it stops."""

    def _leave(self, step: Step, surplus: Sequence[Group]) -> None:
        """The step has what it trains on: what is left open, of it `surplus` complete, is the next step's."""

    def _growing(self, step: Step) -> list[Group]:
        """Groups that this step may wait for."""
        return [one for one in self._pool.groups if not one.complete]

    def _exhausted(self, step: Step) -> bool:
        """Whether nothing grows, and nothing more may be drawn."""
        return super()._exhausted(step) and not self._growing(step)

    @abstractmethod
    def _places(self, step: Step) -> int:
        """New groups that the coming round has places for."""

    def _room(self, step: Step) -> int:
        return min(self._places(step), max(self._most_prompts, self._at_once) - step.drawn)
