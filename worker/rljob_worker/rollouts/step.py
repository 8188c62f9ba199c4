"""Parts of one step of a job, from its prompts to the report of training, and the progress of the job."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rljob_worker.engine.reports import DraftCounts
from rljob_worker.flow import Decision, Group, SpanKind, TokenStream
from rljob_worker.flow.occupancy import Occupancy
from rljob_worker.records.token_files import SampleTokens
from rljob_worker.rollouts.kept_tokens import Kept
from rljob_worker.rollouts.rows import response_row
from rljob_worker.rollouts.times import EnvironmentTimes
from rljob_worker.types import FloatArray, Prompt, StepMetrics


@dataclass(slots=True)
class Progress:
    """The last completed step, and the weights after it."""

    step: int = 0
    weight_version: int = 0


@dataclass(slots=True)
class Step:
    """Groups that one step generated, and their fate."""

    number: int
    weight_version: int
    """Version of the weights that it begins to train with; its tokens are of these or, with a staleness, of earlier
    ones."""
    drawn: int = 0
    """New prompts so far, over all rounds."""
    given_back: int = 0
    """Number of those prompts that are drawn again: the environments of their groups were lost."""
    rounds: int = 0
    groups: list[Group] = field(default_factory=list)
    """All that was scored and decided on, by ordinal; with partial rollout without what is carried over."""
    prompts: dict[int, Prompt] = field(default_factory=dict)
    """Prompts of these groups, by ordinal."""
    left: tuple[Group, ...] = ()
    """Groups that were open at its end: the next one's."""
    drafts: DraftCounts | None = None
    """Guesses of speculative decoding, over all rounds; None without it."""
    long: bool = False
    """Whether it is for groups that tail batching deferred."""
    deferred: list[Group] = field(default_factory=list)
    """Groups that this step deferred, as they were then."""
    discarded: list[Group] = field(default_factory=list)
    """Groups that were too old when it began, as they were then; their prompts are sampled again."""
    oldest_trained: int = 0
    """Tokens of weights before these are left out of the loss."""
    passed: int = 0
    """Groups so far that may be trained on."""
    advantages: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    """[N], of the samples of the groups that are trained on; with a critic their shaped rewards."""
    by_critic: bool = False
    """Whether each token has an advantage of its own, which the trainers keep."""
    occupancy: Occupancy = field(default_factory=lambda: Occupancy(1, 1))
    """Occupancy of the engines, while they generated for it."""
    environments: EnvironmentTimes | None = None
    """Seconds until environments answered, and their failures; None without any environment."""
    rows: list[list[dict[str, Any]]] = field(default_factory=list)
    """One a response, by group: what its trajectories hold."""
    kept: list[Kept] = field(default_factory=list)
    """Samples whose tokens are kept with their log-probabilities."""
    tokens: list[SampleTokens] = field(default_factory=list)
    """Tokens of each of these, with the engine's."""
    trained: list[StepMetrics] = field(default_factory=list)
    """Report of each trainer."""

    def take(self, group: Group, decision: Decision, prompt: Prompt) -> None:
        """Take in a scored group, whose texts are known, with what becomes of it."""
        self.groups.append(replace(group, decision=decision))
        self.prompts[group.ordinal] = prompt

    def of(self, decision: Decision) -> list[Group]:
        """The groups with this decision, by ordinal."""
        return [group for group in self.groups if group.decision is decision]

    @property
    def applied(self) -> bool:
        """Whether the weights changed: False when a value that was not finite kept them as they were."""
        return all(result.applied for result in self.trained)

    def non_finite_reason(self) -> str:
        """Source of the value that stopped the update, for people."""
        reasons = [str(result.detail.get("reason", "")) for result in self.trained if not result.applied]
        return f"step {self.number}: {reasons[0] or 'a loss or gradient was not finite'}; the update was not applied"

    def trained_streams(self) -> list[TokenStream]:
        """Streams of the samples that are trained on, in the order of the groups."""
        return [stream for group in self.of(Decision.TRAINED) for one in group.episodes for stream in one.streams]

    def learned_lengths(self) -> list[int]:
        """Tokens of each sample that is trained on which something is learned from."""
        return [
            sum(
                len(span)
                for stream in one.streams
                for span in stream.spans
                if span.kind is SpanKind.SAMPLED and not span.older_than(self.oldest_trained)
            )
            for group in self.of(Decision.TRAINED)
            for one in group.episodes
        ]

    def samples(self) -> list[list[dict[str, Any]]]:
        """One row a response, for the trajectories, by group."""
        advantages = iter(self.advantages.tolist())
        return [
            [
                self._sample(group, i, next(advantages) if trained and not self.by_critic else None)
                for i in range(len(group.results))
            ]
            for group in self.groups
            for trained in [group.decision is Decision.TRAINED]
        ]

    def _sample(self, group: Group, index: int, advantage: float | None) -> dict[str, Any]:
        assert group.decision is not None
        return response_row(
            self.prompts[group.ordinal],
            group,
            index,
            decision=group.decision.value,
            weight_version=self.weight_version,
            advantage=advantage,
            oldest_trained=self.oldest_trained,
        )
