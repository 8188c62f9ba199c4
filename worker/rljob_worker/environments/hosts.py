"""Environment hosts as the driver sees them: given work, ended at a deadline, replaced, and what they held replayed."""

from __future__ import annotations

import itertools
import pickle
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

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
    Step,
    Stepped,
    checked_began,
    checked_call,
    checked_observation,
    checked_step,
)
from rljob_worker.environments.episodes import EpisodeEnvironment
from rljob_worker.environments.load import Source
from rljob_worker.errors import UserError

_AHEAD, _AHEAD_BYTES = 512, 2**16
"""Bound on a process's pending tasks: that much waits in its socket, also while it writes an answer."""
_CLOSE_SECONDS = 5.0
"""In which environments are closed before their hosts are ended."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds; a host that has not answered by then is ended, and what else it held is replayed."""

    reset: float = 60.0
    step: float = 30.0
    start: float = 60.0
    """For the import of the environment's code."""


@dataclass(slots=True)
class Counts:
    """Failures since they were taken."""

    restarts: int = 0
    """Hosts that were lost."""
    replayed: int = 0
    """Answers that were asked for again."""
    failures: dict[FailureKind, int] = field(default_factory=lambda: dict.fromkeys(FailureKind, 0))
    """Episodes that failed, by kind."""


@dataclass(slots=True, eq=False)
class _Host:
    process: ConfinedProcess
    deadline: float
    """Deadline of its start, or of the first task that it is at."""
    ready: bool = False
    numbers: dict[int, EpisodeEnvironment] = field(default_factory=dict)
    """The environments that it holds, or will, by its own numbers."""
    queue: deque[tuple[int, EpisodeEnvironment | None]] = field(default_factory=deque)
    """Its next tasks: an episode's call, or with None the closing of a number."""
    at: deque[_Task] = field(default_factory=deque)
    """Tasks that it got and has not answered; it does one after the other."""


class _Task(NamedTuple):
    task: int
    number: int
    episode: EpisodeEnvironment | None
    call: Call
    size: int
    """In bytes, about."""


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
        self._hosts: list[_Host] = []
        self._episodes: dict[int, EpisodeEnvironment] = {}
        self._where: dict[int, tuple[_Host, int]] = {}
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
            said = str(value) if kind == "refused" else f"environment: {self._source.title()!r} fails:\n{value}"
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

    def _spawn(self) -> _Host:
        process = ConfinedProcess(
            "rljob_worker.environments.host", self._source, self._place, what="environment host", field="environment"
        )
        host = _Host(process, time.monotonic() + self._deadlines.start)
        self._hosts.append(host)
        return host

    def _is_ready(self, host: _Host, value: Mapping[str, Sequence[Any]]) -> None:
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

    def _give(self, host: _Host) -> None:
        """Let a host do what is next, where it has little or nothing to do."""
        if not host.ready or len(host.at) > _AHEAD // 2:
            return
        given = list(self._next_tasks(host))
        if not given:
            return
        if not host.at:
            host.deadline = time.monotonic() + self._seconds(given[0].call)
        host.at.extend(given)
        try:
            host.process.connection.send_bytes(pickle.dumps([(one.task, one.number, one.call) for one in given]))
        except OSError:
            self._lose(host, host.process.end())

    def _next_tasks(self, host: _Host) -> Iterator[_Task]:
        """Tasks taken out of a host's queue: one of any size where it has nothing to do, else those that have room."""
        count, size = len(host.at), sum(one.size for one in host.at)
        while host.queue:
            number, episode = host.queue[0]
            call = Close() if episode is None else episode.call()
            task = _Task(next(self._tasks), number, episode, call, _size(call))
            count, size = count + 1, size + task.size
            if count > 1 and (count > _AHEAD or size > _AHEAD_BYTES):
                return
            host.queue.popleft()
            yield task

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

    def _read(self, host: _Host) -> None:
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

    def _answered(self, host: _Host, message: list[object]) -> None:
        """Take the answer to what a host is at; ValueError or TypeError when it is none."""
        task, kind, value = message
        if not host.at or task != host.at[0].task:
            raise ValueError(f"task {task!r}")
        _, number, episode, call, _ = host.at[0]
        answer = _received(call, kind, value)
        host.at.popleft()
        if host.at:
            host.deadline = time.monotonic() + self._seconds(host.at[0].call)
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
            if host.deadline > now or (host.ready and not host.at) or host not in self._hosts:
                continue
            host.process.kill()
            call: Call = host.at[0].call if host.at else Close()
            verb = "reset" if isinstance(call, Reset) else "step"
            late = (
                f"{verb} gave no answer within environment.{verb}Seconds ({self._seconds(call):g} s), and its host was "
                "ended"
            )
            self._lose(host, late if host.ready else self._late())

    def _lose(self, host: _Host, why: str) -> None:
        """Replace a host, and have what it held made anew."""
        host.process.kill()
        self._hosts.remove(host)
        self.counts.restarts += 1
        # It answers each before it begins with the next.
        at_work = (
            [host.at[0].episode] if host.ready and host.at else [one for _, one in host.queue] if not host.ready else []
        )
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

    def _seconds(self, call: Call) -> float:
        return self._deadlines.reset if isinstance(call, Reset) else self._deadlines.step

    def _late(self) -> str:
        return f"{self._source.title()!r} has not been imported within {self._deadlines.start:g} s"


def _received(call: Call, kind: object, value: object) -> Began | Stepped | str | None:
    """An answer as a host sent it, which runs code that nobody checked; text for a failure, None for a closing.

    Raises:
        ValueError, TypeError: it is none.
    """
    if kind == "failed":
        if not isinstance(value, str):
            raise ValueError(f"a failure that is {type(value).__name__}")
        return value
    if isinstance(call, Close):
        return None
    expected = "began" if isinstance(call, Reset) else "stepped"
    if kind != expected:
        raise ValueError(f"{kind!r} in the place of {expected!r}")
    if not isinstance(value, list) or len(value) != (3 if isinstance(call, Reset) else 7):
        raise ValueError(f"what {expected} is of another form")
    asked = checked_call(value.pop())
    if isinstance(call, Reset):
        began = checked_began(value)
        return began if asked is None else replace(began, call=asked)
    parts = value.pop()
    found = checked_step(value)
    if not parts and asked is None:
        return found
    return replace(found, parts=tuple(checked_observation(part, "step") for part in parts), call=asked)


def _size(call: Call) -> int:
    """Bytes of a call, about."""
    if isinstance(call, Reset):
        return 1024 + (len(pickle.dumps(call.options)) if call.options else 0)
    return 128 + (4 * len(call.action) if isinstance(call, Step) else 0)


def _bounded(action: str) -> str:
    """An action that fits into a message; ValueError where it does not."""
    if len(action) > MAX_ACTION_BYTES:
        raise ValueError(f"environments: an action of {len(action)} characters: {MAX_ACTION_BYTES} at most")
    return action
