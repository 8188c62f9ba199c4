"""The generating loop: groups grow in the engines, and each goes to its rewards as soon as it is complete."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from rljob_api.spec import Pace
from rljob_worker.cluster.phase_calls import PhaseCalls
from rljob_worker.data.tokenizer import decode_responses
from rljob_worker.errors import StopRequested
from rljob_worker.flow import Episode, Group
from rljob_worker.flow.occupancy import Occupancy
from rljob_worker.flow.pool import OpenGroups
from rljob_worker.rewards.score_calls import RewardSample
from rljob_worker.rollouts.free_pace import FreePace
from rljob_worker.rollouts.generator import Generator
from rljob_worker.rollouts.inputs import Inputs
from rljob_worker.rollouts.policies.base import Assignment
from rljob_worker.rollouts.turns import Beginning, Next, Sample, Turns, next_of
from rljob_worker.rollouts.world import World
from rljob_worker.types import Generation, GenerationRequest, Prompt, RewardResult, SamplingParams

T = TypeVar("T")
_SLICE = 64
"""Answers after which environments begin with those, while the others are still looked at."""


class Growth:
    """Lets groups grow, and has them scored.

    Args:
        generator: the engines.
        calls: gives deadlines.
        inputs: tokenizer and rewards.
        stop: set when generation is to end early.
        worlds: environments, by place in the manifest of their source.
        pace: when the next turn of an episode begins.
    """

    def __init__(
        self,
        generator: Generator,
        calls: PhaseCalls,
        inputs: Inputs,
        stop: threading.Event,
        worlds: Mapping[str, World] | None = None,
        pace: Pace = Pace.TOGETHER,
    ) -> None:
        self._generator = generator
        self._calls = calls
        self._inputs = inputs
        self._stop = stop
        self._free = pace is Pace.FREE
        self._slice = _SLICE if worlds else sys.maxsize
        self.turns = Turns(worlds or {}, stop)

    def begin(self, groups: OpenGroups, beginnings: Sequence[Beginning], samples: int, version: int) -> None:
        """Put groups that have nothing but their prompts, for weights of `version`; errors as of `Turns.begin`."""
        alone = [one for one in beginnings if one.prompt.environment is None]
        for one in alone:
            groups.put(one.prompt, Group.begun(one.ordinal, one.prompt, samples, one.seed, version))
        if len(alone) < len(beginnings):
            with self._waiting_for_environments():
                played = [one for one in beginnings if one.prompt.environment is not None]
                self.turns.begin(groups, played, samples, version)
            # Those of which no environment began have ended.
            self._submit_complete(groups, [(one.ordinal, 0) for one in played])

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
        paused: Callable[[], bool] = lambda: False,
    ) -> None:
        """Generate what is missing of the groups that are assigned, until it is there or each engine was cut or
        harvested. What environments do not answer until then is taken when it goes on.

        Args:
            groups: they.
            assignment: which engine has which of them.
            sampling, version, occupancy, each, lost: as of `Generator.responses`.
            paused: whether engines are harvested, so that environments are not waited for, either.
        """
        assigned = [ordinal for ordinals in (*assignment.held, assignment.waiting) for ordinal in ordinals]
        # Answers that a run before it had waited for.
        answered = [key for ordinal in assigned for key in _answered(groups[ordinal])]
        self._act(groups, dict(zip(answered, self._decoded([_episode(groups, key).answer for key in answered]))))
        if self._free and any(groups.prompt(ordinal).environment is not None for ordinal in assigned):
            self._grow_free(groups, assignment, sampling, version, occupancy, each, lost, paused)
            self._observe(groups, paused)
            return
        while True:
            self._observe(groups, paused)
            if paused():
                return
            responses = self._generator.responses(
                [
                    [one for ordinal in ordinals for one in self._missing(groups, ordinal)]
                    for ordinals in assignment.held
                ],
                sampling,
                version,
                occupancy,
                cuts=assignment.cuts,
                waiting=[self._missing(groups, ordinal) for ordinal in assignment.waiting],
                each=each,
                lost=lost,
            )
            was_cut = False
            for chunk in responses:
                for part in self._slices(chunk):
                    was_cut |= self._take(groups, part, version)
            if was_cut or lost or not self.turns.outstanding(groups):
                break
        self._observe(groups, paused)

    def _grow_free(
        self,
        groups: OpenGroups,
        assignment: Assignment,
        sampling: SamplingParams,
        version: int,
        occupancy: Occupancy,
        each: bool,
        lost: list[str] | None,
        paused: Callable[[], bool],
    ) -> None:
        """Do what `grow` does, asking for each next turn as soon as its environment has answered; nothing is cut."""
        assert assignment.cuts is None, "episodes are not cut"
        following = FreePace(
            assignment,
            self._generator.fleet.sequences,
            missing=lambda ordinal: self._missing(groups, ordinal),
            said=lambda: self._said(groups),
            outstanding=lambda: self.turns.outstanding(groups),
            waited=lambda seconds: self._calls.attribute("env_wait", "rollout", seconds),
            paused=paused,
        )
        shares = [
            [one for ordinal in ordinals for one in self._missing(groups, ordinal)] for ordinals in assignment.held
        ]
        for chunk in self._generator.going_on(
            shares, sampling, version, occupancy, more=following.more, each=each, lost=lost
        ):
            for part in self._slices(chunk):
                # What engines still had of a group that was given back is nobody's.
                self._take(groups, [one for one in part if one[0][0] in groups], version)

    def _said(self, groups: OpenGroups) -> list[tuple[Sample, GenerationRequest]]:
        """Take what environments have said until now; the next turns that follow from it."""
        changed = self.turns.observe_now(groups)
        self._submit_complete(groups, changed)
        found = []
        for key in changed:
            ordinal, sample = key
            if (group := groups.get(ordinal)) is not None:
                request = self.turns.request(group, groups.prompt(ordinal), sample)
                found += [] if request is None else [(key, request)]
        return found

    def _missing(self, groups: OpenGroups, ordinal: int) -> list[tuple[Sample, GenerationRequest]]:
        # Since it was assigned its environments may have been lost, or a step may have taken it.
        group = groups.get(ordinal)
        return [] if group is None else self.turns.requests(group, groups.prompt(ordinal))

    def _slices(self, chunk: Sequence[T]) -> Iterator[Sequence[T]]:
        return (chunk[start : start + self._slice] for start in range(0, len(chunk), self._slice))

    def _take(self, groups: OpenGroups, chunk: Sequence[tuple[Sample, Generation]], version: int) -> bool:
        """Add what engines returned; whether some of it goes on as the same answer."""
        # All texts at once, while the engines go on; a group at once, for each state of it is a value.
        ended = [(key, _episode(groups, key), part) for key, part in chunk if part.finish_reason]
        texts = dict(zip([key for key, _, _ in ended], self._decoded([one.whole(part) for _, one, part in ended])))
        alone = _by_group((key, texts[key]) for key, before, _ in ended if before.opening is None)
        following: dict[Sample, Next] = {}
        for ordinal, parts in _by_group(chunk).items():
            grown = groups.extend(ordinal, parts, version, alone.get(ordinal)).episodes
            following |= {(ordinal, sample): next_of(grown[sample]) for sample in parts}
        done = [key for key, then in following.items() if then is Next.DONE]
        self._submit_complete(groups, done)
        self._act(groups, {key: texts[key] for key, then in following.items() if then is Next.STEPS})
        return Next.GOES_ON in following.values()

    def _act(self, groups: OpenGroups, said: Mapping[Sample, str]) -> None:
        """Have environments answer what was said."""
        for (ordinal, sample), text in said.items():
            self.turns.step(groups, ordinal, sample, text)
        if said:
            self.turns.send()

    def _observe(self, groups: OpenGroups, paused: Callable[[], bool]) -> None:
        """Wait for what environments say; nothing is in the engines."""
        if self.turns.outstanding(groups):
            with self._waiting_for_environments():
                changed = self.turns.observe(groups, paused)
            self._submit_complete(groups, changed)

    def _submit_complete(self, groups: OpenGroups, changed: Sequence[Sample]) -> None:
        for ordinal in dict.fromkeys(ordinal for ordinal, _ in changed):
            if ordinal in groups and groups[ordinal].complete:
                self.submit(groups, groups[ordinal])

    @contextmanager
    def _waiting_for_environments(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._calls.attribute("env_wait", "rollout", time.perf_counter() - began)

    def submit(self, groups: OpenGroups, group: Group) -> None:
        """Begin to score a group that is complete."""
        group, prompt = self.with_texts(group), groups.prompt(group.ordinal)
        self._generator.longest[prompt.uid] = max(group.lengths)
        groups.scoring(group.ordinal)
        self._inputs.rewards.submit(
            [
                RewardSample(
                    _seen(prompt, one), one.sample, one.generation, one.text, group.ordinal, group.renewed, one.turns
                )
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
        texts = self._decoded([one.generation for one in group.episodes])
        if group.episodes[0].opening is not None:
            texts = [one.turns[-1].action for one in group.episodes]
        return replace(group, episodes=tuple(replace(one, text=text) for one, text in zip(group.episodes, texts)))

    def _decoded(self, generations: Sequence[Generation]) -> list[str]:
        return decode_responses(self._inputs.tokenizer, generations) if generations else []


def _by_group(values: Iterable[tuple[Sample, T]]) -> dict[int, dict[int, T]]:
    """Values by the ordinals of their groups, and by sample."""
    found: dict[int, dict[int, T]] = {}
    for (ordinal, sample), value in values:
        found.setdefault(ordinal, {})[sample] = value
    return found


def _answered(group: Group) -> list[Sample]:
    return [(group.ordinal, one.sample) for one in group.episodes if one.answered is not None]


def _seen(prompt: Prompt, episode: Episode) -> Prompt:
    """A prompt as the policy saw it."""
    opening = episode.opening
    return prompt if opening is None or not opening.observation else replace(prompt, text=opening.observation)


def _episode(groups: OpenGroups, key: Sample) -> Episode:
    ordinal, sample = key
    return groups[ordinal].episodes[sample]


def _give(groups: OpenGroups, scored: Iterable[tuple[RewardSample, RewardResult]]) -> None:
    for sample, result in scored:
        assert sample.ordinal is not None
        groups.score(sample.ordinal, sample.index, result, renewed=sample.renewed)
