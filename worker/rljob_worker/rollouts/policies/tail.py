"""Tail batching: a step ends when enough groups are complete, and the others get a step of their own later. Pure.

Every token that is trained on is of the step's own weights: what a step does not train on, it forgets. An open group
has its prompt, its seed and the step that deferred it, between two steps. Within a step, whose rounds are of the same
weights, it keeps its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rljob_worker.flow import Group, tail
from rljob_worker.flow.partial import chosen, spread
from rljob_worker.rollouts.policies.base import Assignment, Beginning, Fleet, Policy, Selection, cut_assignment, without
from rljob_worker.rollouts.step import Step


class TailPolicy(Policy):
    """Short steps, which begin more groups than they train on, and long ones of those that these deferred."""

    def begin(self, step: Step, groups: Sequence[Group]) -> Beginning:
        """A long step where enough groups were deferred, or one of them long enough ago."""
        wait = tail.longest_wait(self._wanted, self._at_once)
        long = tail.is_long(_waiting(groups), self._wanted, step.number, wait)
        # A checkpoint of partial rollout holds tokens of other weights.
        return Beginning([one.anew().at(step.weight_version) for one in groups], long)

    def room(self, step: Step, groups: Sequence[Group]) -> int:
        """Places that no group of the step has."""
        places = self._wanted if step.long else self._at_once
        return min(places - len(self._members(step, groups)), self._most(step))

    def assign(self, step: Step, groups: Sequence[Group], fleet: Fleet) -> Assignment:
        """The step's groups in turn over the engines, which together complete what is missing."""
        members, growing = self._members(step, groups), self.growing(step, groups)
        held = spread([one.ordinal for one in growing], fleet.engines)
        complete = len(members) - len(growing)
        return cut_assignment(held, tail.cuts(held, self._wanted - complete))

    def growing(self, step: Step, groups: Sequence[Group]) -> list[Group]:
        """Groups of the step that are not complete."""
        members = self._members(step, groups)
        return [one for one in groups if one.ordinal in members and not one.complete]

    def select(self, step: Step, groups: Sequence[Group]) -> Selection:
        """The first ones by ordinal; the others that are complete are forgotten, and what grows is deferred."""
        filtered, passed = self._judged(groups)
        if len(passed) < self._wanted:
            return Selection(filtered, len(passed))
        trained = chosen(passed, self._wanted)
        surplus, left = without(passed, trained), without(groups, [*filtered, *trained])
        # A long step waits for all of its groups; those that wait for the next one come after it.
        deferred = [] if step.long else self.growing(step, left)
        late = {one.ordinal for one in deferred}
        left = [replace(one, deferred_at=step.number) if one.ordinal in late else one for one in left]
        return Selection(filtered, len(passed), trained, surplus, deferred, [one.anew() for one in left])

    def _members(self, step: Step, groups: Sequence[Group]) -> set[int]:
        return set(tail.members(_waiting(groups), self._wanted, step.long))


def _waiting(groups: Sequence[Group]) -> tail.Waiting:
    return {one.ordinal: one.deferred_at for one in groups}
