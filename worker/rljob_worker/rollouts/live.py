"""Environments of open episodes: which sample has which, what it was asked for, and what it has answered."""

from __future__ import annotations

import itertools
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from rljob_worker.environments.base import Answer
from rljob_worker.environments.hosts import EnvironmentHosts
from rljob_worker.flow.pool import OpenGroups
from rljob_worker.rollouts.times import EnvironmentTimes
from rljob_worker.rollouts.world import World
from rljob_worker.types import Prompt


@dataclass(slots=True, eq=False)
class Live:
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


class LiveEnvironments:
    """The environments of open episodes. One thread calls."""

    def __init__(self) -> None:
        self._keys = itertools.count()
        self._by_key: dict[int, Live] = {}
        self._by_sample: dict[tuple[OpenGroups, int, int], Live] = {}
        self._waiting: dict[OpenGroups, dict[int, Live]] = {}
        """By key: environments that were asked for something that was not used yet."""
        self._came: dict[int, Answer] = {}
        """By key: answers that nobody used yet."""

    def new(self, world: World, groups: OpenGroups, ordinal: int, sample: int, prompt: Prompt) -> Live:
        """The environment of a sample, which was asked for nothing yet."""
        renewed = ordinal in groups and groups[ordinal].renewed
        live = Live(next(self._keys), world, groups, ordinal, sample, prompt, renewed)
        self._by_key[live.key] = self._by_sample[groups, ordinal, sample] = live
        return live

    def of(self, groups: OpenGroups, ordinal: int, sample: int) -> Live | None:
        """A sample's environment; None: it has none."""
        return self._by_sample.get((groups, ordinal, sample))

    def among(self, groups: OpenGroups, ordinal: int | None = None) -> list[Live]:
        """The environments of these groups, or of one of them."""
        own = (live for live in self._by_key.values() if live.groups is groups)
        return [live for live in own if ordinal is None or live.ordinal == ordinal]

    def reset(self, live: Live) -> None:
        """Have it begin, or begin anew."""
        live.steps = 0
        self.ask(live, None)
        live.world.hosts.begin(live.key, live.prompt.seed, live.prompt.options)

    def ask(self, live: Live, action: str | None) -> None:
        """Note that it is asked for the answer to an action, or with None for its reset."""
        live.action, live.asked = action, time.monotonic()
        self._waiting.setdefault(live.groups, {})[live.key] = live

    def waits(self, live: Live) -> bool:
        """Whether it was asked for something that was not used yet."""
        return live.key in self._waiting.get(live.groups, {})

    def waiting(self, groups: OpenGroups, among: Container[int] | None = None) -> Mapping[int, Live]:
        """By key, those of these groups that were; `among` ordinals, or with None of all."""
        waiting = self._waiting.get(groups, {})
        return waiting if among is None else {key: live for key, live in waiting.items() if live.ordinal in among}

    def receive(self, hosts: Iterable[EnvironmentHosts], patience: float, times: EnvironmentTimes) -> None:
        """Keep what environments answer within so many seconds, and note how long it took."""
        asked = [one for one in hosts if one.outstanding]
        for one in asked:
            for key, answer in one.take(patience / len(asked)):
                live = self._by_key.get(key)
                if live is None:
                    continue
                # One that cannot be made anew may fail without being asked.
                if self.waits(live):
                    seconds = time.monotonic() - live.asked
                    (times.resets if live.action is None else times.steps).append(seconds)
                self._came[key] = answer

    def ready(self, waiting: Mapping[int, Live]) -> list[Live]:
        """The ones that have answered."""
        return [waiting[key] for key in self._came if key in waiting]

    def taken(self, ready: Iterable[Live]) -> Iterator[tuple[Live, Answer]]:
        """Their answers, which nothing waits for any more."""
        for live in ready:
            # Using one may have ended another.
            if live.key in self._came:
                del self._waiting[live.groups][live.key]
                yield live, self._came.pop(live.key)

    def end(self, live: Live) -> None:
        """Close it."""
        live.world.hosts.end(live.key)
        self.forget(live)

    def forget(self, live: Live) -> None:
        """Without closing: its hosts have given it up."""
        self._by_key.pop(live.key, None)
        self._came.pop(live.key, None)
        self._waiting.get(live.groups, {}).pop(live.key, None)
        if self._by_sample.get((live.groups, live.ordinal, live.sample)) is live:
            del self._by_sample[live.groups, live.ordinal, live.sample]

    def forget_groups(self, groups: OpenGroups) -> None:
        """Close the environments of these groups."""
        for live in self.among(groups):
            self.end(live)
        self._waiting.pop(groups, None)
