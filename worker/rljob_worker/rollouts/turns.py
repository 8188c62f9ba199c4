"""Continuation after an answer: nothing, or what an environment says to it, and the next answer.

An answer goes to its environment as soon as it is there, and is answered beside what engines still generate. A group
whose environment was lost for good is given back: all of it, since advantages are relative to all samples of a prompt.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from rljob_worker.environments.base import AgentCall, Answer, Began, EnvironmentFailure, FailureKind, Stepped
from rljob_worker.environments.hosts import EnvironmentHosts
from rljob_worker.errors import JobError, StopRequested
from rljob_worker.flow import Episode, Finish, Group, TokenStream
from rljob_worker.flow.pool import OpenGroups
from rljob_worker.flow.turns import Budget, Opening, Turn, TurnEnd
from rljob_worker.rollouts.observations import Observations
from rljob_worker.rollouts.times import EnvironmentTimes
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


@dataclass(frozen=True, slots=True)
class World:
    """The environments of a source, and how their turns become tokens.

    Attributes:
        hosts: hold them.
        observations: their texts as tokens.
        budget: how long an episode may be.
        error_reward: of an episode whose environment gave what is no answer; None: that fails the job.
        max_error_share: of a step's or an evaluation's episodes that may end so.
    """

    hosts: EnvironmentHosts
    observations: Observations
    budget: Budget
    error_reward: float | None = 0.0
    max_error_share: float = 0.2


class Beginning(NamedTuple):
    """A group that is to begin."""

    ordinal: int
    prompt: Prompt
    seed: int
    """Seed of its first sample's noise."""


@dataclass(slots=True, eq=False)
class _Live:
    """An environment that is there, or will be."""

    key: int
    world: World
    groups: OpenGroups
    ordinal: int
    sample: int
    prompt: Prompt
    renewed: bool
    """Its group's, when it was made: samples that are drawn again have another environment."""
    steps: int = 0
    """That it has answered."""
    action: str | None = None
    """Action that it is asked for; None: its reset."""
    asked: float = 0.0

    @property
    def current(self) -> bool:
        """Whether its group is what it was made for."""
        return self.ordinal not in self.groups or self.groups[self.ordinal].renewed is self.renewed


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
        self._keys = itertools.count()
        self._by_key: dict[int, _Live] = {}
        self._by_sample: dict[tuple[OpenGroups, int, int], _Live] = {}
        self._lost: Counter[tuple[OpenGroups, int]] = Counter()
        """Number of times that a group was given back."""
        self._given_back: list[int] = []
        self._waiting: dict[OpenGroups, dict[int, _Live]] = {}
        """By key: environments that were asked for something that was not used yet."""
        self._came: dict[int, Answer] = {}
        """By key: answers that nobody used yet."""
        self._times = EnvironmentTimes()

    def outstanding(self, groups: OpenGroups) -> bool:
        """Whether an environment of these groups was asked for something that `observe` did not give them."""
        return bool(self._waiting.get(groups))

    # --- groups -------------------------------------------------------------------------------

    def at_once(self, prompts: Sequence[Prompt], samples: int) -> int:
        """Number of these prompts that may begin together, each with so many samples."""
        worlds = [self._worlds[one.environment] for one in prompts if one.environment is not None]
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
                self._reset(groups, one.ordinal, sample, one.prompt)
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
        budget = None if prompt.environment is None else self._worlds[prompt.environment].budget
        asked = group.requests(budget)
        if prompt.pictures:
            asked = [(sample, replace(request, pictures=prompt.pictures)) for sample, request in asked]
        return [((group.ordinal, sample), request) for sample, request in asked]

    def request(self, group: Group, prompt: Prompt, sample: int) -> GenerationRequest | None:
        """Request that an engine gets to go on with one sample; None: there is none."""
        assert prompt.environment is not None
        budget = self._worlds[prompt.environment].budget
        return group.episodes[sample].request(group.seed + sample, budget, group.prompt_tokens)

    def take_given_back(self) -> list[int]:
        """Groups that were given up since the last time, for their environments were lost."""
        taken, self._given_back = self._given_back, []
        return taken

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
        live = self._by_sample.get((groups, ordinal, sample))
        if live is not None and not live.current:
            self._end(live)
            live = None
        if live is not None and self._waits(live):
            # It was asked before its group was left alone.
            return
        if live is not None and live.steps != len(episode.turns):
            # What was sampled with it was dropped.
            self._end(live)
            live = None
        if live is None:
            live = self._new(groups, ordinal, sample, prompt)
            if episode.turns and not live.world.hosts.deterministic:
                self._restart(live)
                return
            assert episode.opening is not None
            began = Began(episode.opening.observation, episode.opening.values)
            before: list[Began | Stepped] = [began]
            before += [Stepped(one.observation, one.reward, False, False, one.values) for one in episode.turns]
            live.steps = len(episode.turns)
            live.world.hosts.begin(
                live.key, episode.opening.seed, prompt.options, before, [one.action for one in episode.turns]
            )
        self._ask(live, action)
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
                    self._end(live)
                    continue
                after = self._after(live, groups[live.ordinal].episodes[live.sample], answer)
                if after is None:
                    continue
                if after.finish is not None:
                    self._end(live)
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
        for live in [live for live in self._by_key.values() if live.groups is groups]:
            self._end(live)
        self._waiting.pop(groups, None)

    # --- inside -------------------------------------------------------------------------------

    def _hosts(self) -> list[EnvironmentHosts]:
        return list({id(world.hosts): world.hosts for world in self._worlds.values()}.values())

    def _answers(
        self, groups: OpenGroups, among: Container[int] | None, paused: Callable[[], bool] = lambda: False
    ) -> Iterator[Iterator[tuple[_Live, Answer]]]:
        """Answers of environments as they come, several at once, until none of them waits, also for what is asked
        meanwhile.

        Args:
            groups: theirs.
            among: ordinals of those that are meant; None: all.
            paused: whether those that have not answered are not waited for.
        """
        while waiting := self._asked(groups, among):
            if self._stop.is_set():
                raise StopRequested
            if ready := [waiting[key] for key in self._came if key in waiting]:
                yield self._taken(ready)
            elif paused():
                return
            else:
                self._receive(_PATIENCE_SECONDS)

    def _asked(self, groups: OpenGroups, among: Container[int] | None) -> Mapping[int, _Live]:
        waiting = self._waiting.get(groups, {})
        return waiting if among is None else {key: live for key, live in waiting.items() if live.ordinal in among}

    def _taken(self, ready: Iterable[_Live]) -> Iterator[tuple[_Live, Answer]]:
        for live in ready:
            # Using one may have ended another.
            if live.key in self._came:
                del self._waiting[live.groups][live.key]
                yield live, self._came.pop(live.key)

    def _waits(self, live: _Live) -> bool:
        """Whether it was asked for something that was not used yet."""
        return live.key in self._waiting.get(live.groups, {})

    def _ask(self, live: _Live, action: str | None) -> None:
        """Note that it is asked for the answer to an action, or with None for its reset."""
        live.action, live.asked = action, time.monotonic()
        self._waiting.setdefault(live.groups, {})[live.key] = live

    def _receive(self, patience: float) -> None:
        asked = [hosts for hosts in self._hosts() if hosts.outstanding]
        for hosts in asked:
            for key, answer in hosts.take(patience / len(asked)):
                live = self._by_key.get(key)
                if live is None:
                    continue
                seconds = time.monotonic() - live.asked
                (self._times.resets if live.action is None else self._times.steps).append(seconds)
                self._came[key] = answer

    def _after(self, live: _Live, episode: Episode, answer: Answer) -> Episode | None:
        """An episode with what its environment says; None where it begins anew or is not there any more."""
        world = live.world
        if isinstance(answer, Began):
            opening = _opening(live.prompt, answer)
            stream = TokenStream.of_prompt(self._first(live.prompt, answer))
            return Episode(live.ordinal, live.sample, stream, opening=opening, restarts=episode.restarts + 1)
        if isinstance(answer, EnvironmentFailure):
            if answer.kind is not FailureKind.DATA or world.error_reward is None:
                self._fail(live, answer, episode.restarts)
                return None
            turn = Turn(live.action or "", "", world.error_reward, True, {}, answer.text, episode.number)
            return episode.ended(turn, Finish.FAILED)
        live.steps += 1
        assert live.action is not None
        turn = Turn(live.action, answer.observation, answer.reward, answer.done, answer.values, stream=episode.number)
        if answer.call is not None:
            return self._called(live, episode, turn, answer.call)
        turns, tokens = len(episode.turns) + 1, len(episode.stream)
        end = Finish.ENVIRONMENT if answer.done else world.budget.next(tokens, turns)
        if isinstance(end, Finish):
            return episode.ended(turn, end)
        ids = world.observations.after(episode.ended_by, answer.observation, answer.parts)
        if not ids:
            empty = (
                f"environment of {live.prompt.environment}, seed {live.prompt.seed}, step {turns}: its observation is "
                "empty, and spec.episodes.before and .after are no tokens: a turn has to append something"
            )
            return self._after(live, episode, self._wrong(empty))
        end = world.budget.next(tokens + len(ids), turns)
        return episode.ended(turn, end) if isinstance(end, Finish) else episode.observed(turn, ids)

    def _called(self, live: _Live, episode: Episode, turn: Turn, call: AgentCall) -> Episode | None:
        """An episode with what its agent asks next, or its end, where that has no room for an answer."""
        world, turns, streams = live.world, len(episode.turns) + 1, episode.streams
        try:
            if not 0 <= call.stream <= len(streams):
                raise ValueError(f"a call in stream {call.stream} of {len(streams)}")
            if call.stream < len(streams):
                goes_on = streams[call.stream]
                # An answer of another stream than the newest one ended by its last token where that ends answers.
                ended_by = episode.ended_by if call.stream == episode.number else int(goes_on.ids[-1])
                before, ids = len(goes_on), world.observations.asked(ended_by, call.messages)
            else:
                before, ids = 0, world.observations.conversation(call.messages)
        except ValueError as error:
            wrong = f"agent of {live.prompt.environment}, row {live.prompt.uid}: {error}"
            return self._after(live, episode, self._wrong(wrong))
        end = world.budget.next(before + len(ids), turns)
        return episode.ended(turn, end) if isinstance(end, Finish) else episode.called(turn, ids, call.stream)

    def _wrong(self, text: str) -> EnvironmentFailure:
        """A failure by what an environment said, which its hosts have not counted."""
        self._times.failures[FailureKind.DATA] += 1
        return EnvironmentFailure(FailureKind.DATA, text)

    def _ends_at_once(self, live: _Live, failure: EnvironmentFailure) -> bool:
        """Whether a sample whose environment did not begin has ended by that, as one has where a step fails.

        Its hosts have given it up.
        """
        counted = failure.kind is FailureKind.DATA and live.world.error_reward is not None
        if not counted or not live.prompt.token_ids:
            return False
        self._forget(live)
        return True

    def _opened(
        self, groups: OpenGroups, one: Beginning, openings: Sequence[Began | EnvironmentFailure], version: int
    ) -> Group:
        """A group as its environments began; of one that failed there is the row's prompt, as far as it has room."""
        assert one.prompt.environment is not None
        world = self._worlds[one.prompt.environment]
        starts: list[tuple[Opening, Sequence[int]]] = []
        ended: dict[int, Turn] = {}
        for sample, began in enumerate(openings):
            if isinstance(began, Began):
                try:
                    starts.append((_opening(one.prompt, began), self._first(one.prompt, began)))
                    continue
                except JobError as error:
                    live = self._by_sample[groups, one.ordinal, sample]
                    failure = self._wrong(str(error))
                    live.world.hosts.end(live.key)
                    if began.call is None or not self._ends_at_once(live, failure):
                        raise
            else:
                failure = began
            assert world.error_reward is not None
            starts.append((Opening(one.prompt.seed, ""), one.prompt.token_ids[: world.budget.max_tokens]))
            ended[sample] = Turn("", "", world.error_reward, True, {}, failure.text)
        group = Group.opened(one.ordinal, one.prompt, starts, one.seed, version)
        return group.with_episodes(group.episodes[sample].not_begun(turn) for sample, turn in ended.items())

    def _first(self, prompt: Prompt, began: Began) -> tuple[int, ...]:
        assert prompt.environment is not None
        world = self._worlds[prompt.environment]
        if began.call is not None:
            try:
                ids = world.observations.conversation(began.call.messages)
            except ValueError as error:
                raise JobError(f"{prompt.environment}.environment.agent: row {prompt.uid}: {error}") from None
        else:
            ids = prompt.token_ids or world.observations.first(began.observation)
        if isinstance(world.budget.next(len(ids), 0), Finish):
            raise JobError(
                f"{prompt.environment}.environment: the first observation with seed {prompt.seed} has {len(ids)} "
                f"tokens, which leaves no room for an answer: spec.episodes.maxTokens is {world.budget.max_tokens}"
            )
        return ids

    def _fail(self, live: _Live, failure: EnvironmentFailure, restarts: int = 0) -> None:
        """Begin an episode anew, give its group back, or raise JobError."""
        # Its hosts have given it up.
        self._forget(live)
        if failure.kind is FailureKind.REPLAY and not restarts:
            again = self._new(live.groups, live.ordinal, live.sample, live.prompt)
            self._restart(again)
            return
        self._lost[live.groups, live.ordinal] += 1
        if failure.kind is not FailureKind.INFRA or self._lost[live.groups, live.ordinal] >= _TRIES:
            raise JobError(failure.text)
        self._give_back(live.groups, live.ordinal)

    def _give_back(self, groups: OpenGroups, ordinal: int) -> None:
        for live in [one for one in self._by_key.values() if (one.groups, one.ordinal) == (groups, ordinal)]:
            self._end(live)
        groups.give_back(ordinal)
        self._given_back.append(ordinal)

    def _new(self, groups: OpenGroups, ordinal: int, sample: int, prompt: Prompt) -> _Live:
        assert prompt.environment is not None
        renewed = ordinal in groups and groups[ordinal].renewed
        live = _Live(next(self._keys), self._worlds[prompt.environment], groups, ordinal, sample, prompt, renewed)
        self._by_key[live.key] = self._by_sample[groups, ordinal, sample] = live
        return live

    def _reset(self, groups: OpenGroups, ordinal: int, sample: int, prompt: Prompt) -> None:
        before = self._by_sample.get((groups, ordinal, sample))
        if before is not None:
            self._end(before)
        self._restart(self._new(groups, ordinal, sample, prompt))

    def _restart(self, live: _Live) -> None:
        live.steps = 0
        self._ask(live, None)
        live.world.hosts.begin(live.key, live.prompt.seed, live.prompt.options)

    def _end(self, live: _Live) -> None:
        live.world.hosts.end(live.key)
        self._forget(live)

    def _forget(self, live: _Live) -> None:
        self._by_key.pop(live.key, None)
        self._came.pop(live.key, None)
        self._waiting.get(live.groups, {}).pop(live.key, None)
        if self._by_sample.get((live.groups, live.ordinal, live.sample)) is live:
            del self._by_sample[live.groups, live.ordinal, live.sample]


def _opening(prompt: Prompt, began: Began) -> Opening:
    return Opening(prompt.seed, began.observation, began.values)
