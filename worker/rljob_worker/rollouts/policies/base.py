"""A policy: which groups a step begins, which engine generates which of them, and which are trained on. Pure.

A policy sees the groups of the pool and the step, and decides; `rollouts.Rollouts` carries its decisions out:

    begin   once a step: open groups as the step finds them
    room    each round: how many groups begin
    assign  each round: which engine generates which groups, and where it stops
    select  each time that rewards came: what the step trains on, and what it leaves open

No policy looks at a clock or at what other engines do: which groups an engine has, and in which of its steps it is cut,
follow from the open groups alone, so that a step that is repeated after a kill has the same tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rljob_api import RLJobSpec, derived
from rljob_worker.engine.seeds import request_seed
from rljob_worker.flow import Group
from rljob_worker.flow.filters import has_variance
from rljob_worker.rollouts.step import Step
from rljob_worker.types import Cut


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines of a generation.

    Attributes:
        engines: how many.
        sequences: that each of them runs at once.
        longest: tokens of the longest response to a prompt when it was seen last, by the prompt's uid.
    """

    engines: int
    sequences: int
    longest: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Groups to engines, each group whole.

    Attributes:
        held: for each engine, ordinals of its groups.
        cuts: for each engine, where it stops although responses still grow; None: nowhere.
        waiting: ordinals of groups that no engine has yet, in the order in which engines take them that finish others.
    """

    held: Sequence[Sequence[int]]
    cuts: Sequence[Cut] | None = None
    waiting: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Beginning:
    """Open groups as a step finds them.

    Attributes:
        groups: what the pool is to hold.
        long: whether the step is for groups that tail batching deferred.
        discarded: groups that were too old, as they were.
        oldest_trained: tokens of weights before these are left out of the loss.
    """

    groups: Sequence[Group]
    long: bool = False
    discarded: Sequence[Group] = ()
    oldest_trained: int = 0


@dataclass(frozen=True, slots=True)
class Selection:
    """Fate of groups.

    Attributes:
        filtered: ready groups that are not trained on, ever.
        passed: how many of those that are ready may be trained on.
        trained: what the step trains on; empty: it needs more groups.
        surplus: ready groups whose samples are forgotten.
        deferred: groups that a later step generates, as they are now.
        left: what the pool is to hold, where not all that is open goes on as it is.
    """

    filtered: Sequence[Group] = ()
    passed: int = 0
    trained: Sequence[Group] = ()
    surplus: Sequence[Group] = ()
    deferred: Sequence[Group] = ()
    left: Sequence[Group] | None = None


class Policy(ABC):
    """Common parts of all policies.

    Args:
        spec: the job.
    """

    outlasts = True
    """Whether groups may outlast a step."""
    endless = False
    """Whether a step generates as long as it is left to: each chunk of responses has the phase's deadline then."""

    def __init__(self, spec: RLJobSpec) -> None:
        rollout, oversampling = spec.rollout, spec.rollout.oversampling
        self._spec = spec
        self._wanted = rollout.prompts_per_step
        self._at_once = derived.prompts_at_once(spec)
        self._filters = oversampling is not None and oversampling.filter is not None
        self._most_prompts = self._wanted * (1 if oversampling is None else oversampling.limit)

    def begin(self, step: Step, groups: Sequence[Group]) -> Beginning:
        """Open groups as the step finds them.

        Raises:
            JobError: they cannot be those of this step.
        """
        return Beginning([one.at(step.weight_version) for one in groups])

    def seed(self, step: Step, ordinal: int) -> int:
        """Seed of the first sample of a group that the step begins; the others follow."""
        del ordinal
        return request_seed(self._spec.seed, step.number, step.drawn, 0)

    @abstractmethod
    def room(self, step: Step, groups: Sequence[Group]) -> int:
        """Number of groups that begin now; what is below 0 counts as 0."""

    @abstractmethod
    def assign(self, step: Step, groups: Sequence[Group], fleet: Fleet) -> Assignment:
        """Assignment of groups that are not complete to engines.

        Raises:
            JobError: a group cannot be trained on in time.
        """

    @abstractmethod
    def select(self, step: Step, groups: Sequence[Group]) -> Selection:
        """Groups that the step trains on, of those that are ready, where they are enough."""

    def unasked(self, groups: Sequence[Group]) -> list[Group]:
        """Ready groups that the filter does not take, and of which the job's function has not said anything."""
        return [one for one in self._judged(groups)[1] if one.kept is None]

    def _judged(self, groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
        """Ready groups: those that the filter or the job's function takes, and the others."""
        ready = [one for one in groups if one.results]
        filtered = [one for one in ready if one.kept is False or (self._filters and not has_variance(one.rewards))]
        return filtered, without(ready, filtered)

    def growing(self, step: Step, groups: Sequence[Group]) -> list[Group]:
        """Groups that the step may wait for."""
        del step
        return [one for one in groups if not one.complete]

    def exhausted(self, step: Step, groups: Sequence[Group]) -> bool:
        """Whether nothing grows, and the step may draw no more prompts."""
        return step.drawn - step.given_back >= self._most_prompts and not self.growing(step, groups)

    def _most(self, step: Step) -> int:
        """Groups that a step may still begin where more grow at once than it trains on."""
        return max(self._most_prompts, self._at_once) - step.drawn + step.given_back


def cut_assignment(held: Sequence[Sequence[int]], cuts: Sequence[Cut]) -> Assignment:
    """An assignment with cuts; an engine that is to complete nothing gets nothing, and stops at once."""
    return Assignment([ordinals if cut.quotas else () for ordinals, cut in zip(held, cuts)], cuts)


def without(groups: Sequence[Group], others: Sequence[Group]) -> list[Group]:
    """Groups that are not among the others."""
    ordinals = {one.ordinal for one in others}
    return [one for one in groups if one.ordinal not in ordinals]
