"""Tail batching: a step ends when enough groups are complete, and the others get a step of their own later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rljob_worker.flow import Decision, Group, tail
from rljob_worker.flow.partial import spread
from rljob_worker.rollouts.growing_rollouts import GrowingRollouts
from rljob_worker.rollouts.step import Step
from rljob_worker.types import Cut


class TailRollouts(GrowingRollouts):
    """Every token that is trained on is of the step's own weights: what a step does not train on, it forgets.

    An open group has its prompt, its seed and the step that deferred it, between two steps. Within a step, whose rounds
    are of the same weights, it keeps its tokens.
    """

    def next_step(self) -> Step:
        """Begin the next step: a long one where enough groups were deferred, or one of them long enough ago."""
        step = super().next_step()
        # A checkpoint of partial rollout holds tokens of other weights.
        self._pool.change(lambda one: one.anew().at(step.weight_version))
        wait = tail.longest_wait(self._wanted, self._at_once)
        step.long = tail.is_long(self._waiting(), self._wanted, step.number, wait)
        return step

    @property
    def _wanted(self) -> int:
        return self._spec.rollout.prompts_per_step

    def _members(self, step: Step) -> list[int]:
        return tail.members(self._waiting(), self._wanted, step.long)

    def _places(self, step: Step) -> int:
        return (self._wanted if step.long else self._at_once) - len(self._members(step))

    def _growing(self, step: Step) -> list[Group]:
        members = [self._pool[ordinal] for ordinal in self._members(step)]
        return [one for one in members if not one.complete]

    def _division(self, step: Step) -> tuple[Sequence[Sequence[int]], Sequence[Cut]]:
        growing = [one.ordinal for one in self._growing(step)]
        held = spread(growing, len(self._engines))
        complete = len(self._members(step)) - len(growing)
        return held, tail.cuts(held, self._wanted - complete)

    def _leave(self, step: Step, surplus: Sequence[Group]) -> None:
        for group in surplus:
            step.take(group, Decision.SURPLUS, self._pool.prompt(group.ordinal), self._texts(group))
        # A long step waits for all of its groups; those that wait for the next one come after it.
        for one in [] if step.long else self._growing(step):
            step.deferred.append(one)
            self._pool.put(replace(one, deferred_at=step.number))
        self._pool.change(Group.anew)

    def _waiting(self) -> tail.Waiting:
        return {one.ordinal: one.deferred_at for one in self._pool.groups}
