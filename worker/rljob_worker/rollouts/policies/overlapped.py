"""Generation that goes on while trainers learn, through updates of the weights; no token is too old for its step. Pure.

A step begins groups as far ahead as the bound allows, and trains on some that are complete. What is in the engines when
the weights change is harvested, and goes on under the new weights with the version of each token.
"""

from __future__ import annotations

from collections.abc import Sequence

from rljob_api import RLJobSpec, derived
from rljob_api.spec.rollout import StalenessLimit
from rljob_worker.engine.seeds import request_seed
from rljob_worker.errors import JobError
from rljob_worker.flow import Group
from rljob_worker.flow.admission import next_batch, ranges, room
from rljob_worker.flow.limits import expired, is_waited_for, oldest_trained
from rljob_worker.rollouts.policies.base import Assignment, Beginning, Fleet, Policy, Selection
from rljob_worker.rollouts.policies.partial import check_in_time
from rljob_worker.rollouts.step import Step


class OverlappedPolicy(Policy):
    """The policy of mode `Async`."""

    endless = True

    def __init__(self, spec: RLJobSpec) -> None:
        super().__init__(spec)
        self._max_staleness = derived.max_staleness(spec)
        self._staleness = derived.staleness(spec)
        self._limit = derived.on_limit(spec)

    def begin(self, step: Step, groups: Sequence[Group]) -> Beginning:
        """Sample again the groups that no step can train on any more."""
        version = step.weight_version
        groups = [one.at(version) for one in groups]
        late = expired(groups, version, self._max_staleness, self._limit)
        dropped = {one.ordinal for one in late}
        open_groups = [one.sampled_again(version) if one.ordinal in dropped else one for one in groups]
        oldest = oldest_trained(version, self._max_staleness, self._limit)
        return Beginning(open_groups, discarded=late, oldest_trained=oldest)

    def seed(self, step: Step, ordinal: int) -> int:
        """Seeds of a run whose steps draw their own prompts, so that staleness 0 has its bits."""
        del step
        of_step, place = divmod(ordinal, self._wanted)
        return request_seed(self._spec.seed, of_step + 1, place, 0)

    def room(self, step: Step, groups: Sequence[Group]) -> int:
        """Room as far ahead as the bound allows."""
        left = self._spec.steps - step.number + 1
        return room(len(groups), self._wanted, left, self._max_staleness, self._staleness.in_flight)

    def assign(self, step: Step, groups: Sequence[Group], fleet: Fleet) -> Assignment:
        """Each engine a range of the open groups, with about as many samples that go on."""
        waited_for = [one for one in groups if is_waited_for(one, self._limit)]
        check_in_time(waited_for, self._wanted, step.weight_version, self._max_staleness)
        growing = self.growing(step, groups)
        places = ranges([one.open_samples for one in growing], fleet.engines)
        return Assignment([[growing[place].ordinal for place in of_engine] for of_engine in places])

    def select(self, step: Step, groups: Sequence[Group]) -> Selection:
        """The next batch, once all groups are ready that the step waits for."""
        ready = {one.ordinal for one in groups if one.results}
        order, version = self._staleness.order, step.weight_version
        batch = next_batch(groups, ready, self._wanted, version, self._max_staleness, order, self._limit)
        for group in batch or ():
            if (staleness := group.staleness(version)) > self._max_staleness and self._limit is not StalenessLimit.MASK:
                raise JobError(
                    f"rollout: the group of prompt {group.ordinal} has tokens of weights {group.oldest_version}, "
                    f"{staleness} updates before the {version} of step {step.number}; spec.rollout.staleness.max is "
                    f"{self._max_staleness}"
                )
        return Selection(passed=len(batch or ()), trained=batch or ())
