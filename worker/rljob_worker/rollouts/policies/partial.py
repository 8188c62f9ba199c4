"""Partial rollout: a step ends when enough groups are complete, and the others go on in the next one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_api import RLJobSpec, derived
from rljob_worker.errors import JobError
from rljob_worker.flow import Group
from rljob_worker.flow.partial import chosen, overdue, quotas, share, spread
from rljob_worker.rollouts.policies.base import Assignment, Fleet, Policy, Selection, cut_assignment
from rljob_worker.rollouts.step import Step
from rljob_worker.types import Cut


class PartialPolicy(Policy):
    """`rollout.partial.factor` times as many groups grow at once as a step trains on; none is dropped."""

    def __init__(self, spec: RLJobSpec) -> None:
        super().__init__(spec)
        self._max_staleness = derived.max_staleness(spec)

    def room(self, step: Step, groups: Sequence[Group]) -> int:
        """Places that no open group has."""
        return min(self._at_once - len(groups), self._most(step))

    def assign(self, step: Step, groups: Sequence[Group], fleet: Fleet) -> Assignment:
        """Old and new groups in turn over the engines, each of which stops by what it holds."""
        check_in_time(groups, self._wanted, step.weight_version, self._max_staleness)
        needed = quotas(groups, self._wanted, step.weight_version, self._max_staleness)
        held = spread([one.ordinal for one in self.growing(step, groups)], fleet.engines)
        return cut_assignment(held, [Cut(share(needed, frozenset(ordinals))) for ordinals in held])

    def select(self, step: Step, groups: Sequence[Group]) -> Selection:
        """The oldest of those that are complete; what is left goes on as it is."""
        filtered, passed = self._judged(groups)
        if len(passed) < self._wanted:
            return Selection(filtered, len(passed))
        return Selection(filtered, len(passed), chosen(passed, self._wanted))


def check_in_time(groups: Sequence[Group], wanted: int, version: int, max_staleness: int) -> None:
    """Raise JobError where a group cannot be trained on in time, whatever the steps from `version` on wait for."""
    late = overdue(groups, wanted, version, max_staleness)
    if late is not None:
        raise JobError(
            f"rollout: the group of prompt {late.ordinal} has tokens of weights {late.oldest_version} and cannot "
            f"be trained on within spec.rollout.staleness.max {max_staleness} of weights {version}"
        )
