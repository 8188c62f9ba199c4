"""The generating loop: groups grow in the engines, and each goes to its rewards as soon as it is complete."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rljob_worker.cluster.phase_calls import PhaseCalls
from rljob_worker.data.tokenizer import decode_responses
from rljob_worker.errors import StopRequested
from rljob_worker.flow import Episode, Group
from rljob_worker.flow.occupancy import Occupancy
from rljob_worker.flow.pool import OpenGroups
from rljob_worker.rewards.score_calls import RewardSample
from rljob_worker.rollouts.generator import Generator
from rljob_worker.rollouts.inputs import Inputs
from rljob_worker.rollouts.policies.base import Assignment
from rljob_worker.rollouts.turns import Next, Turns
from rljob_worker.types import GenerationRequest, RewardResult, SamplingParams

Sample = tuple[int, int]
"""Ordinal of a group, and number of a sample in it."""


class Growth:
    """Lets groups grow, and has them scored.

    Args:
        generator: the engines.
        calls: gives deadlines.
        inputs: tokenizer and rewards.
        stop: set when generation is to end early.
    """

    def __init__(self, generator: Generator, calls: PhaseCalls, inputs: Inputs, stop: threading.Event) -> None:
        self._generator = generator
        self._calls = calls
        self._inputs = inputs
        self._stop = stop
        self._turns = Turns()

    def grow(
        self,
        groups: OpenGroups,
        assignment: Assignment,
        sampling: SamplingParams,
        version: int,
        occupancy: Occupancy,
        *,
        each: bool = False,
        lost: list[str] | None = None,
    ) -> None:
        """Generate what is missing of the groups that are assigned, until it is there or each engine was cut or
        harvested.

        Args:
            groups: they.
            assignment: which engine has which of them.
            sampling, version, occupancy, each, lost: as of `Generator.responses`.
        """
        responses = self._generator.responses(
            [[one for ordinal in ordinals for one in _missing(groups[ordinal])] for ordinals in assignment.held],
            sampling,
            version,
            occupancy,
            cuts=assignment.cuts,
            waiting=[_missing(groups[ordinal]) for ordinal in assignment.waiting],
            each=each,
            lost=lost,
        )
        for chunk in responses:
            for (ordinal, sample), generation in chunk:
                groups.extend(ordinal, sample, generation, version)
            done = [key for key, _ in chunk if self._turns.next(_episode(groups, key)) is Next.DONE]
            # All texts of a chunk at once, while the engines go on.
            for (ordinal, sample), text in zip(done, self._decoded([_episode(groups, key) for key in done])):
                groups.say(ordinal, sample, text)
            for ordinal in dict.fromkeys(ordinal for ordinal, _ in done):
                if groups[ordinal].complete:
                    self.submit(groups, groups[ordinal])

    def submit(self, groups: OpenGroups, group: Group) -> None:
        """Begin to score a group that is complete."""
        group, prompt = self.with_texts(group), groups.prompt(group.ordinal)
        self._generator.longest[prompt.uid] = max(group.lengths)
        groups.scoring(group.ordinal)
        self._inputs.rewards.submit(
            [
                RewardSample(prompt, one.sample, one.generation, one.text, group.ordinal, group.renewed)
                for one in group.episodes
            ]
        )

    @property
    def outstanding(self) -> int:
        """Calls of rewards that were begun and have not ended."""
        return self._inputs.rewards.outstanding

    def collect(self, groups: OpenGroups) -> None:
        """Give groups all rewards that are outstanding; StopRequested when the job was asked to stop.

        Ray's job API sends a stop signal to all of the driver's descendants, so that scores of a reward that was just
        ended by it may be those of an error.
        """
        seconds = self._calls.deadline(self._calls.phase("reward"))
        scored = self._inputs.rewards.take_all(time.monotonic() + seconds)
        if self._stop.is_set():
            raise StopRequested
        _give(groups, scored)

    def receive(self, groups: OpenGroups, patience: float) -> bool:
        """Give groups the rewards that have come; whether there were some, for which it waits so many seconds."""
        scored = self._inputs.rewards.take(patience, self._calls.deadline("reward_wait"))
        _give(groups, scored)
        return bool(scored)

    def with_texts(self, group: Group) -> Group:
        """A complete group with the text of each response; one that a checkpoint holds has none."""
        if all(one.text is not None for one in group.episodes):
            return group
        texts = self._decoded(group.episodes)
        return replace(group, episodes=tuple(replace(one, text=text) for one, text in zip(group.episodes, texts)))

    def _decoded(self, episodes: Sequence[Episode]) -> list[str]:
        return decode_responses(self._inputs.tokenizer, [one.generation for one in episodes]) if episodes else []


def _missing(group: Group) -> list[tuple[Sample, GenerationRequest]]:
    return [((group.ordinal, sample), request) for sample, request in group.requests()]


def _episode(groups: OpenGroups, key: Sample) -> Episode:
    ordinal, sample = key
    return groups[ordinal].episodes[sample]


def _give(groups: OpenGroups, scored: Iterable[tuple[RewardSample, RewardResult]]) -> None:
    for sample, result in scored:
        assert sample.ordinal is not None
        groups.score(sample.ordinal, sample.index, result, renewed=sample.renewed)
