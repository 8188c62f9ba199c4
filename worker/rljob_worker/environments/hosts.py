"""Environment hosts as the driver sees them: given work, ended at a deadline, replaced, and what they held replayed."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from rljob_worker.confined.messages import NoMessageError
from rljob_worker.confined.process import ConfinedProcess, Place
from rljob_worker.data.turns import Schema
from rljob_worker.environments.base import (
    MAX_ACTION_BYTES,
    Answer,
    Began,
    Call,
    Close,
    EnvironmentFailure,
    FailureKind,
    Reset,
    Stepped,
)
from rljob_worker.environments.episodes import EpisodeEnvironment
from rljob_worker.environments.host_process import Deadlines, HostProcess
from rljob_worker.environments.load import Source
from rljob_worker.errors import UserError

_CLOSE_SECONDS = 5.0
"""In which environments are closed before their hosts are ended."""


@dataclass(slots=True)
class Counts:
    """Failures since they were taken."""

    restarts: int = 0
    """Hosts that were lost."""
    replayed: int = 0
    """Answers that were asked for again."""
    failures: dict[FailureKind, int] = field(default_factory=lambda: dict.fromkeys(FailureKind, 0))
    """Episodes that failed, by kind."""


class EnvironmentHosts:
    """Holds one environment for each episode, in up to `processes` confined processes.

    What is asked for goes to the processes by `send`, all of it in one message to each, and is answered by `take`,
    which sends, too. Each process does one thing after the other. One that dies, or is ended at a deadline, is
    replaced. The episode for which it was at work is tried again, up to `retries` times; it and those that it held
    beside are made anew by seed and actions, and must answer as before.

    An episode that failed is given up. One thread calls. Use as a context manager, or `close()`.

    Args:
        source: of the environment.
        place: where hosts run.
        processes: how many.
        per_process: environments in each at most.
        deadlines: of its answers.
        deterministic: whether one can be made anew by seed and actions; where not, what a lost host held has failed.
        retries: of an episode, after losses of hosts at work for it.
    """

    def __init__(
        self,
        source: Source,
        place: Place,
        *,
        processes: int = 1,
        per_process: int = 16,
        deadlines: Deadlines | None = None,
        deterministic: bool = True,
        retries: int = 2,
    ) -> None:
        self._source, self._place = source, place
        self._processes, self._per_process = processes, per_process
        self._deadlines = deadlines or Deadlines()
        self.deterministic, self._retries = deterministic, retries
        self._hosts: list[HostProcess] = []
        self._episodes: dict[int, EpisodeEnvironment] = {}
        self._where: dict[int, tuple[HostProcess, int]] = {}
        """By key: the host and its number there."""
        self._wanted: set[int] = set()
        """Keys of episodes whose answers are wanted and have not come."""
        self._found: deque[tuple[int, Answer]] = deque()
        self._numbers, self._tasks = itertools.count(), itertools.count()
        self.counts = Counts()
        self.examples: list[str] = []
        """Answers that the environment calls valid, when a host is ready."""
        self.schemas: list[Schema] = []
        """Schemas of its tools, likewise."""

    def start(self) -> None:
        """Start one host, and wait until it has imported the environment.

        Raises:
            UserError: it cannot be used, and why.
        """
        host = self._spawn()
        try:
            late = not host.process.connection.poll(max(0.0, host.deadline - time.monotonic()))
            answer: list[Any] = ["refused", f"environment: {self._late()}"] if late else host.process.read()
            kind, value = answer
        except (EOFError, OSError, ValueError):
            said = host.process.end()
            self.close()
            raise UserError(f"environment: {self._source.title()!r} does not import: {said}") from None
        if kind != "ready":
            self.close()
            said = str(value) if kind == "refused" else f"environment: {self._source.title()!r} cannot be made: {value}"
            raise UserError(said)
        self._is_ready(host, value)

    def begin(
        self,
        key: int,
        seed: int,
        options: Mapping[str, object] | None = None,
        answers: Sequence[Began | Stepped] = (),
        actions: Sequence[str] = (),
    ) -> None:
        """Make an episode's environment and reset it.

        Args:
            key: names the episode.
            seed: of the reset.
            options: of the reset.
            answers: of one that was elsewhere before, of its reset and of each step; it is made anew with the next
                step, and must answer as before.
            actions: of these steps.

        Raises:
            ValueError: there is an episode of that name, or no place for a further one; there are not as many answers
                as the reset and the actions have.
        """
        if answers and len(answers) != len(actions) + 1:
            raise ValueError(f"environments: {len(answers)} answers to a reset and {len(actions)} actions")
        if key in self._episodes:
            raise ValueError(f"environments: there is an episode {key} already")
        if len(self._episodes) >= self.places:
            raise ValueError(
                f"environments: {len(self._episodes)} episodes are open, and {self._processes} processes hold "
                f"{self._per_process} each"
            )
        episode = EpisodeEnvironment(key, seed, options or {}, list(answers), list(actions))
        self._episodes[key] = episode
        if episode.waits:
            self._wanted.add(key)
            self._enqueue(episode)

    def step(self, key: int, action: str, cut: bool = False) -> None:
        """Answer an episode's action, `cut` at its longest or not; ValueError where it has ended, or is not there."""
        if key not in self._episodes:
            raise ValueError(f"environments: there is no episode {key}")
        episode = self._episodes[key]
        episode.act(_bounded(action), cut)
        self._wanted.add(key)
        self._enqueue(episode)

    def holds(self, key: int) -> bool:
        """Whether an episode may be asked for a step: one that was begun, and has neither ended nor failed.

        Where environments cannot be made anew, one may fail that is asked for nothing; `take` says so.
        """
        return key in self._episodes

    def end(self, key: int) -> None:
        """Close an episode's environment; without effect where the episode has failed."""
        if self._episodes.pop(key, None) is None:
            return
        where = self._where.pop(key, None)
        if where is not None:
            host, number = where
            if key in self._wanted:
                host.queue = deque(one for one in host.queue if one[0] != number)
            host.numbers.pop(number, None)
            host.queue.append((number, None))
        self._wanted.discard(key)

    def send(self) -> None:
        """Let processes begin with what is wanted of them."""
        for host in list(self._hosts):
            self._give(host)

    def take_counts(self) -> Counts:
        """Failures since the last time."""
        taken, self.counts = self.counts, Counts()
        return taken

    @property
    def places(self) -> int:
        """Episodes that may be open at once."""
        return self._processes * self._per_process

    @property
    def outstanding(self) -> int:
        """Answers that are wanted and have not been taken."""
        return len(self._wanted) + len(self._found)

    def take(self, patience: float) -> list[tuple[int, Answer]]:
        """The answers that have come, each with its episode's key; empty where none is wanted, or came in time.

        Args:
            patience: seconds to wait for the first.
        """
        deadline = time.monotonic() + patience
        self.send()
        while not self._found and self._wanted:
            left = deadline - time.monotonic()
            if left < 0:
                break
            self._receive(left)
            self._expire()
        found = list(self._found)
        self._found.clear()
        return found

    def close(self) -> None:
        """Close all environments and end the hosts; idempotent."""
        idle = [host for host in self._hosts if host.ready and not host.at]
        for host in idle:
            # It closes what it holds, and ends.
            host.process.connection.close()
        for host in self._hosts:
            if host in idle:
                host.process.end(_CLOSE_SECONDS)
            host.process.kill()
        self._hosts.clear()
        self._episodes.clear()
        self._wanted.clear()
        self._where.clear()

    def __enter__(self) -> EnvironmentHosts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- inside -------------------------------------------------------------------------------

    def _spawn(self) -> HostProcess:
        process = ConfinedProcess(
            "rljob_worker.environments.host", self._source, self._place, what="environment host", field="environment"
        )
        host = HostProcess(process, self._deadlines, time.monotonic() + self._deadlines.start)
        self._hosts.append(host)
        return host

    def _is_ready(self, host: HostProcess, value: Mapping[str, Sequence[Any]]) -> None:
        """Take what a host says when it has imported the environment; TypeError where that is something else."""
        host.ready, self.examples = True, [str(one) for one in value["examples"]]
        self.schemas = [dict(one) for one in value["schemas"]]

    def _enqueue(self, episode: EpisodeEnvironment) -> None:
        """Give an episode's next call to the host that holds it, or will."""
        if episode.key not in self._where:
            free = len(self._hosts) < self._processes and all(host.numbers for host in self._hosts)
            host = self._spawn() if free or not self._hosts else min(self._hosts, key=lambda one: len(one.numbers))
            number = next(self._numbers)
            host.numbers[number] = episode
            self._where[episode.key] = host, number
        host, number = self._where[episode.key]
        host.queue.append((number, episode))

    def _give(self, host: HostProcess) -> None:
        try:
            host.give(self._tasks)
        except OSError:
            self._lose(host, host.process.end())

    def _receive(self, patience: float) -> None:
        now = time.monotonic()
        busy = [host.deadline for host in self._hosts if host.at or not host.ready]
        timeout = max(0.0, min([patience, *(deadline - now for deadline in busy)]))
        by_connection = {host.process.connection: host for host in self._hosts}
        for source in wait(list(by_connection), timeout):
            assert isinstance(source, Connection)
            host = by_connection[source]
            # Losing one may have ended another.
            if host in self._hosts:
                self._read(host)

    def _read(self, host: HostProcess) -> None:
        """Take what has come of a host."""
        try:
            for message in host.process.messages():
                if host.ready and message[1:2] == ["gone"]:
                    self._lose(host, f"{message[-1]}, and its host with it")
                    return
                if host.ready:
                    self._answered(host, message)
                else:
                    kind, value = message
                    if kind != "ready":
                        self._lose(host, f"does not start: {value}")
                        return
                    self._is_ready(host, value)
        except (NoMessageError, ValueError, TypeError, KeyError) as error:
            self._lose(host, f"the environment host was ended: it sent what is no answer ({error})")
        except EOFError:
            self._lose(host, host.process.end())
        else:
            self._give(host)

    def _answered(self, host: HostProcess, message: list[object]) -> None:
        """Take the answer to what a host is at; ValueError or TypeError when it is none."""
        task, answer = host.answered(message)
        number, episode = task.number, task.episode
        if episode is None or self._episodes.get(episode.key) is not episode:
            return
        if isinstance(answer, str):
            # Its host has closed it.
            host.numbers.pop(number, None)
            self._where.pop(episode.key, None)
            self._fail(episode, FailureKind.DATA, answer)
            return
        assert answer is not None
        if episode.position < len(episode.answers):
            self.counts.replayed += 1
        wanted = episode.take(answer)
        if isinstance(wanted, EnvironmentFailure):
            self._fail(episode, wanted.kind, wanted.text)
        elif wanted is None:
            host.queue.appendleft((number, episode))
        else:
            self._wanted.discard(episode.key)
            self._found.append((episode.key, wanted))

    def _expire(self) -> None:
        now = time.monotonic()
        for host in list(self._hosts):
            if host not in self._hosts or not host.late(now):
                continue
            host.process.kill()
            call: Call = host.at[0].call if host.at else Close()
            verb = "reset" if isinstance(call, Reset) else "step"
            seconds = f"environment.{verb}Seconds ({self._deadlines.of(call):g} s)"
            late = f"{verb} gave no answer within {seconds}, and its host was ended"
            self._lose(host, late if host.ready else self._late())

    def _lose(self, host: HostProcess, why: str) -> None:
        """Replace a host, and have what it held made anew."""
        host.process.kill()
        self._hosts.remove(host)
        self.counts.restarts += 1
        at_work = host.at_work()
        for episode in host.numbers.values():
            self._where.pop(episode.key, None)
            episode.lost()
        for episode in host.numbers.values():
            if episode in at_work:
                episode.losses += 1
                if episode.losses > self._retries:
                    self._fail(episode, FailureKind.INFRA, why)
                    continue
            if episode.answers and not self.deterministic:
                self._fail(
                    episode, FailureKind.INFRA, f"{why}; it is not deterministic, so that it cannot be made anew"
                )
            elif episode.waits:
                self._enqueue(episode)

    def _fail(self, episode: EpisodeEnvironment, kind: FailureKind, why: str) -> None:
        """Give an episode up, and say so in the place of an answer."""
        self.counts.failures[kind] += 1
        step = len(episode.answers)
        where = "reset" if not step else f"step {step}"
        text = f"environment {self._source.title()}, seed {episode.seed}, {where}: {why}"
        self.end(episode.key)
        self._found.append((episode.key, EnvironmentFailure(kind, text)))

    def _late(self) -> str:
        return f"{self._source.title()!r} has not been imported, made and closed within {self._deadlines.start:g} s"


def _bounded(action: str) -> str:
    """An action that fits into a message; ValueError where it does not."""
    if len(action) > MAX_ACTION_BYTES:
        raise ValueError(f"environments: an action of {len(action)} characters: {MAX_ACTION_BYTES} at most")
    return action
