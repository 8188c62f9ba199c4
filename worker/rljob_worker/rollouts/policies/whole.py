"""Whole groups: each group that a step begins is generated to its end, in this step. Pure.

With over-sampling a step begins more groups than it trains on, and others where a filter took too many. With engines of
their own (mode `Disaggregated`) the batch of the next step may be made ahead, and is then in the pool when it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rljob_api import RLJobSpec, derived
from rljob_api.spec import Mode
from rljob_api.spec.rollout import RolloutAssignment
from rljob_worker.errors import JobError
from rljob_worker.flow import Group
from rljob_worker.flow.partial import chosen
from rljob_worker.rollouts.policies.base import Assignment, Beginning, Fleet, Policy, Selection, without
from rljob_worker.rollouts.step import Step


class WholePolicy(Policy):
    """The policy of jobs without partial rollout and tail batching, whose engines stand still for new weights."""

    outlasts = False

    def __init__(self, spec: RLJobSpec) -> None:
        super().__init__(spec)
        self._factor = 1.0 if spec.rollout.oversampling is None else spec.rollout.oversampling.factor
        self._batch_ahead = spec.mode is Mode.DISAGGREGATED
        self._max_staleness = derived.max_staleness(spec)

    def begin(self, step: Step, groups: Sequence[Group]) -> Beginning:
        """Open groups are the batch that was made ahead; elsewhere they are another policy's, and forgotten."""
        if not self._batch_ahead or not groups:
            return Beginning(())
        if len(groups) != self._wanted or not all(one.complete for one in groups):
            raise JobError(f"checkpoint: {len(groups)} groups were carried over, not {self._wanted} complete ones")
        for one in groups:
            if (staleness := one.staleness(step.weight_version)) > self._max_staleness:
                raise JobError(
                    f"rollout: the group of prompt {one.ordinal} has tokens of weights "
                    f"{one.oldest_version}, {staleness} updates before the {step.weight_version} of step "
                    f"{step.number}; spec.rollout.staleness.max is {self._max_staleness}"
                )
        return Beginning(groups)

    def room(self, step: Step, groups: Sequence[Group]) -> int:
        """Number of missing groups, times the factor of over-sampling."""
        del groups
        wanted = derived.prompts_of_round(self._wanted - step.passed, self._factor)
        return min(wanted, self._most_prompts - step.drawn + step.given_back)

    def assign(self, step: Step, groups: Sequence[Group], fleet: Fleet) -> Assignment:
        """Each engine its share of the new groups, side by side."""
        return in_shares(
            self.growing(step, groups), fleet, when_free=self._spec.rollout.assignment is RolloutAssignment.WHEN_FREE
        )

    def select(self, step: Step, groups: Sequence[Group]) -> Selection:
        """The first ones by ordinal: neither a response's length nor the time of its end has a part in it."""
        filtered, passed = self._judged(groups)
        if len(passed) < self._wanted:
            return Selection(filtered, len(passed))
        trained = chosen(passed, self._wanted)
        return Selection(filtered, len(trained), trained, without(passed, trained), left=())


def in_shares(groups: Sequence[Group], fleet: Fleet, *, when_free: bool) -> Assignment:
    """Groups to engines: each a range of them, as even as can be.

    Args:
        groups: by ordinal, each with as many samples.
        fleet: the engines.
        when_free: where an engine's share is more than it runs at once, those with the longest responses begin, in
            turn over the engines, and engines take others as they finish theirs.
    """
    ordinals = [one.ordinal for one in groups]
    shares = contiguous(ordinals, fleet.engines)
    at_once = max(1, fleet.sequences // max((len(one.episodes) for one in groups), default=1))
    if not when_free or all(len(share) <= at_once for share in shares):
        return Assignment(shares)
    usual = sum(fleet.longest.values()) / max(1, len(fleet.longest))
    ordered = [one.ordinal for one in sorted(groups, key=lambda one: -fleet.longest.get(one.prompt_uid, usual))]
    first = at_once * fleet.engines
    return Assignment(
        [ordered[engine : first : fleet.engines] for engine in range(fleet.engines)], waiting=ordered[first:]
    )


def contiguous(ordinals: Sequence[int], engines: int) -> list[Sequence[int]]:
    """A range of ordinals for each engine, as even as can be."""
    bounds = [len(ordinals) * engine // engines for engine in range(engines + 1)]
    return [ordinals[start:stop] for start, stop in pairwise(bounds)]
