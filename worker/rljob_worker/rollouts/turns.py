"""Continuation after an answer: nothing, or what an environment says to it, and the next answer.

An answer goes to its environment as soon as it is there, and is answered beside what engines still generate. A group
whose environment was lost for good is given back: all of it, since advantages are relative to all samples of a prompt.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

from rljob_worker.environments.base import Answer, Began, EnvironmentFailure, FailureKind, Stepped
from rljob_worker.environments.hosts import EnvironmentHosts
from rljob_worker.errors import JobError, StopRequested
from rljob_worker.flow import Episode, Finish, Group
from rljob_worker.flow.pool import OpenGroups
from rljob_worker.flow.turns import Opening, Turn, TurnEnd
from rljob_worker.rollouts.live import Live, LiveEnvironments
from rljob_worker.rollouts.times import EnvironmentTimes
from rljob_worker.rollouts.world import World, opening_of
from rljob_worker.types import GenerationRequest, Prompt

Sample = tuple[int, int]
"""Ordinal of a group, and number of a sample in it."""
_PATIENCE_SECONDS, _LOOK_SECONDS = 0.05, 0.001
_TRIES = 3
"""Tries of a group, whose environments are lost for good each time."""


class Next(StrEnum):
    """Continuation of an episode."""

    DONE = "done"
    """Nothing: the sample is complete."""
    GOES_ON = "goes on"
    """The same answer: it was cut."""
    STEPS = "steps"
    """The environment answers."""


class Beginning(NamedTuple):
    """A group that is to begin."""

    ordinal: int
    prompt: Prompt
    seed: int
    """Seed of its first sample's noise."""


def next_of(episode: Episode) -> Next:
    """Continuation of an episode after its last sampling."""
    if episode.answered is not None:
        return Next.STEPS
    return Next.GOES_ON if episode.finish is None else Next.DONE


class Turns:
    """The environments of open episodes. One thread calls.

    An answer that is outstanding when its group is left alone is taken when the group goes on.

    Args:
        worlds: by place in the manifest of the source, as `Prompt.environment` names it.
        stop: set when the job was asked to stop.
    """

    def __init__(self, worlds: Mapping[str, World], stop: threading.Event) -> None:
        self._worlds, self._stop = worlds, stop
        self._live = LiveEnvironments()
        self._lost: Counter[tuple[OpenGroups, int]] = Counter()
        """Number of times that a group was given back."""
        self._given_back: list[int] = []
        self._times = EnvironmentTimes()

    def outstanding(self, groups: OpenGroups) -> bool:
        """Whether an environment of these groups was asked for something that `observe` did not give them."""
        return bool(self._live.waiting(groups))

    # --- groups -------------------------------------------------------------------------------

    def at_once(self, prompts: Sequence[Prompt], samples: int) -> int:
        """Number of these prompts that may begin together, each with so many samples."""
        worlds = [self._world(one) for one in prompts if one.environment is not None]
        return min((max(1, world.hosts.places // samples) for world in worlds), default=max(1, len(prompts)))

    def begin(self, groups: OpenGroups, wanted: Sequence[Beginning], samples: int, version: int) -> None:
        """Put groups whose samples have an environment each, once all of those have begun.

        Those that `take_given_back` then names are not there. A sample of a row whose environment does not begin has
        ended, without a token of the policy.

        Raises:
            JobError: an environment does not begin, where that fails the job or no row has tokens to be its prompt, or
                leaves no room for an answer.
            StopRequested: the job was asked to stop.
        """
        begun: dict[int, dict[int, Began | EnvironmentFailure]] = {one.ordinal: {} for one in wanted}
        for one in wanted:
            for sample in range(samples):
                if (before := self._live.of(groups, one.ordinal, sample)) is not None:
                    self._live.end(before)
                self._live.reset(self._live.new(self._world(one.prompt), groups, one.ordinal, sample, one.prompt))
        # Others of these groups may be asked for the next step at the same time.
        for come in self._answers(groups, begun):
            for live, answer in come:
                assert isinstance(answer, Began | EnvironmentFailure)
                if isinstance(answer, Began) or self._ends_at_once(live, answer):
                    begun[live.ordinal][live.sample] = answer
                else:
                    self._fail(live, answer)
        for one in wanted:
            if len(openings := begun[one.ordinal]) == samples and one.ordinal not in self._given_back:
                began = [openings[sample] for sample in range(samples)]
                groups.put(one.prompt, self._opened(groups, one, began, version))

    def requests(self, group: Group, prompt: Prompt) -> list[tuple[Sample, GenerationRequest]]:
        """Requests that engines get to go on with a group."""
        asked = group.requests(None if prompt.environment is None else self._world(prompt).budget)
        if prompt.pictures:
            asked = [(sample, replace(request, pictures=prompt.pictures)) for sample, request in asked]
        return [((group.ordinal, sample), request) for sample, request in asked]

    def request(self, group: Group, prompt: Prompt, sample: int) -> GenerationRequest | None:
        """Request that an engine gets to go on with one sample; None: there is none."""
        return group.episodes[sample].request(group.seed + sample, self._world(prompt).budget, group.prompt_tokens)

    def take_given_back(self) -> list[int]:
        """Groups that were given up since the last time, for their environments were lost."""
        taken, self._given_back = self._given_back, []
        return taken

    def no_times(self) -> EnvironmentTimes | None:
        """Times and failures of a step for which nothing was asked yet; None without any environment."""
        return EnvironmentTimes() if self._worlds else None

    def take_times(self) -> EnvironmentTimes | None:
        """Answer times and failures of environments since the last time, evaluations included; None without any."""
        if not self._worlds:
            return None
        taken, self._times = self._times, EnvironmentTimes()
        for hosts in self._hosts():
            counts = hosts.take_counts()
            # An episode that failed for its process counts as that process.
            taken.failures.update({**counts.failures, FailureKind.INFRA: counts.restarts})
        return taken

    # --- turns --------------------------------------------------------------------------------

    def step(self, groups: OpenGroups, ordinal: int, sample: int, action: str) -> None:
        """Have the environment of a sample answer what the policy said.

        One that is not there is made anew by its seed and what was done in it, or begins anew where that cannot be.
        """
        episode, prompt = groups[ordinal].episodes[sample], groups.prompt(ordinal)
        live = self._live.of(groups, ordinal, sample)
        if live is not None and not live.current:
            self._live.end(live)
            live = None
        if live is not None and self._live.waits(live):
            # It was asked before its group was left alone.
            return
        if live is not None and live.steps != len(episode.turns):
            # What was sampled with it was dropped.
            self._live.end(live)
            live = None
        if live is None:
            live = self._live.new(self._world(prompt), groups, ordinal, sample, prompt)
            if episode.turns and not live.world.hosts.deterministic:
                self._live.reset(live)
                return
            assert episode.opening is not None
            began = Began(episode.opening.observation, episode.opening.values)
            before: list[Began | Stepped] = [began]
            before += [Stepped(one.observation, one.reward, False, False, one.values) for one in episode.turns]
            live.steps = len(episode.turns)
            live.world.hosts.begin(
                live.key, episode.opening.seed, prompt.options, before, [one.action for one in episode.turns]
            )
        self._live.ask(live, action)
        # One that was lost while the policy answered has failed already, and that is its answer.
        if live.world.hosts.holds(live.key):
            live.world.hosts.step(live.key, action, cut=episode.answered is TurnEnd.LENGTH)

    def send(self) -> None:
        """Let environments begin to answer what was said to them."""
        for hosts in self._hosts():
            hosts.send()

    def observe(self, groups: OpenGroups, paused: Callable[[], bool]) -> list[Sample]:
        """Give groups what environments say, until all have, or `paused` is true; returns the samples that got it.

        Raises:
            JobError: an environment failed where that fails the job.
            StopRequested: the job was asked to stop.
        """
        changed = []
        for come in self._answers(groups, None, paused):
            # A group at once, for each state of it is a value.
            grown: dict[int, list[Episode]] = {}
            for live, answer in come:
                if not live.current:
                    self._live.end(live)
                    continue
                after = self._after(live, groups[live.ordinal].episodes[live.sample], answer)
                if after is None:
                    continue
                if after.finish is not None:
                    self._live.end(live)
                grown.setdefault(live.ordinal, []).append(after)
                changed.append((live.ordinal, live.sample))
            for ordinal, episodes in grown.items():
                # It may have been given back for the last of them.
                if ordinal in groups:
                    groups.replace(ordinal, episodes)
        return changed

    def observe_now(self, groups: OpenGroups) -> list[Sample]:
        """Do what `observe` does, without waiting for environments that have not answered yet."""
        if not self.outstanding(groups) or self._stop.is_set():
            # Who waits for the engines has them interrupted first.
            return []
        self._receive(_LOOK_SECONDS)
        return self.observe(groups, lambda: True)

    def check_errors(self, played: Iterable[tuple[Prompt, Group]]) -> None:
        """JobError where environments failed in too many episodes of these groups; one is not; thread-safe."""
        by_world: dict[str, list[Episode]] = {}
        for prompt, group in played:
            if prompt.environment is not None:
                by_world.setdefault(prompt.environment, []).extend(group.episodes)
        for place, episodes in by_world.items():
            failed = [one for one in episodes if one.finish is Finish.FAILED]
            most = self._worlds[place].max_error_share
            if len(failed) > max(1.0, most * len(episodes)):
                raise JobError(
                    f"{place}.environment: {len(failed)} of {len(episodes)} episodes ended with an error, which is "
                    f"more than spec.episodes.maxErrorShare {most:g}; the first: {failed[0].turns[-1].error}"
                )

    def forget(self, groups: OpenGroups) -> None:
        """Close the environments of these groups."""
        self._live.forget_groups(groups)

    # --- inside -------------------------------------------------------------------------------

    def _world(self, prompt: Prompt) -> World:
        assert prompt.environment is not None
        return self._worlds[prompt.environment]

    def _hosts(self) -> list[EnvironmentHosts]:
        return list({id(world.hosts): world.hosts for world in self._worlds.values()}.values())

    def _answers(
        self, groups: OpenGroups, among: Container[int] | None, paused: Callable[[], bool] = lambda: False
    ) -> Iterator[Iterator[tuple[Live, Answer]]]:
        """Answers of environments as they come, several at once, until none of them waits, also for what is asked
        meanwhile.

        Args:
            groups: theirs.
            among: ordinals of those that are meant; None: all.
            paused: whether those that have not answered are not waited for.
        """
        while waiting := self._live.waiting(groups, among):
            if self._stop.is_set():
                raise StopRequested
            if ready := self._live.ready(waiting):
                yield self._live.taken(ready)
            elif paused():
                return
            else:
                self._receive(_PATIENCE_SECONDS)

    def _receive(self, patience: float) -> None:
        self._live.receive(self._hosts(), patience, self._times)

    def _after(self, live: Live, episode: Episode, answer: Answer) -> Episode | None:
        """An episode with what its environment says; None where it begins anew or is not there any more."""
        if isinstance(answer, Began):
            return live.world.begun_anew(live.prompt, episode, answer)
        if isinstance(answer, Stepped):
            live.steps += 1
            assert live.action is not None
            after = live.world.answered(live.prompt, episode, live.action, answer)
            if isinstance(after, Episode):
                return after
            answer = self._wrong(after)
        if not live.world.takes(answer):
            self._fail(live, answer, episode.restarts)
            return None
        return episode.ended(live.world.failed(answer, live.action or "", episode.number), Finish.FAILED)

    def _wrong(self, failure: EnvironmentFailure) -> EnvironmentFailure:
        """A failure by what an environment said, which its hosts have not counted."""
        self._times.failures[failure.kind] += 1
        return failure

    def _ends_at_once(self, live: Live, failure: EnvironmentFailure) -> bool:
        """Whether a sample whose environment did not begin has ended by that, as one has where a step fails.

        Its hosts have given it up.
        """
        if not live.world.takes(failure) or not live.prompt.token_ids:
            return False
        self._live.forget(live)
        return True

    def _opened(
        self, groups: OpenGroups, one: Beginning, openings: Sequence[Began | EnvironmentFailure], version: int
    ) -> Group:
        """A group as its environments began; of one that failed there is the row's prompt, as far as it has room."""
        world = self._world(one.prompt)
        starts: list[tuple[Opening, Sequence[int]]] = []
        ended: dict[int, Turn] = {}
        for sample, began in enumerate(openings):
            if isinstance(began, Began):
                try:
                    starts.append((opening_of(one.prompt, began), world.first(one.prompt, began)))
                    continue
                except JobError as error:
                    live = self._live.of(groups, one.ordinal, sample)
                    assert live is not None
                    failure = self._wrong(EnvironmentFailure(FailureKind.DATA, str(error)))
                    live.world.hosts.end(live.key)
                    if began.call is None or not self._ends_at_once(live, failure):
                        raise
            else:
                failure = began
            starts.append((Opening(one.prompt.seed, ""), one.prompt.token_ids[: world.budget.max_tokens]))
            ended[sample] = world.failed(failure)
        group = Group.opened(one.ordinal, one.prompt, starts, one.seed, version)
        return group.with_episodes(group.episodes[sample].not_begun(turn) for sample, turn in ended.items())

    def _fail(self, live: Live, failure: EnvironmentFailure, restarts: int = 0) -> None:
        """Begin an episode anew, give its group back, or raise JobError."""
        # Its hosts have given it up.
        self._live.forget(live)
        if failure.kind is FailureKind.REPLAY and not restarts:
            self._live.reset(self._live.new(live.world, live.groups, live.ordinal, live.sample, live.prompt))
            return
        self._lost[live.groups, live.ordinal] += 1
        if failure.kind is not FailureKind.INFRA or self._lost[live.groups, live.ordinal] >= _TRIES:
            raise JobError(failure.text)
        for one in self._live.among(live.groups, live.ordinal):
            self._live.end(one)
        live.groups.give_back(live.ordinal)
        self._given_back.append(live.ordinal)
