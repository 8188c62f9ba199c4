"""One environment host as the driver sees it: its queue, its deadline, and what its answers say."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rljob_worker.confined.process import ConfinedProcess
from rljob_worker.environments.base import (
    Began,
    Call,
    Close,
    Reset,
    Step,
    Stepped,
    checked_began,
    checked_call,
    checked_observation,
    checked_step,
)
from rljob_worker.environments.episodes import EpisodeEnvironment

_AHEAD, _AHEAD_BYTES = 512, 2**16
"""Bound on a process's pending tasks: that much waits in its socket, also while it writes an answer."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds; a host that has not answered by then is ended, and what else it held is replayed."""

    reset: float = 60.0
    step: float = 30.0
    start: float = 60.0
    """For the import of the environment's code."""

    def of(self, call: Call) -> float:
        """Deadline of a call."""
        return self.reset if isinstance(call, Reset) else self.step


class Task(NamedTuple):
    """A call that a host gets.

    Attributes:
        task: its number, which the answer has too.
        number: the host's own, of the environment.
        episode: that the call is of; None: its environment is closed.
        call: what is asked.
        size: in bytes, about.
    """

    task: int
    number: int
    episode: EpisodeEnvironment | None
    call: Call
    size: int


@dataclass(slots=True, eq=False)
class HostProcess:
    """A process that holds environments, and does one thing after the other."""

    process: ConfinedProcess
    deadlines: Deadlines
    deadline: float
    """Deadline of its start, or of the first task that it is at."""
    ready: bool = False
    numbers: dict[int, EpisodeEnvironment] = field(default_factory=dict)
    """The environments that it holds, or will, by its own numbers."""
    queue: deque[tuple[int, EpisodeEnvironment | None]] = field(default_factory=deque)
    """Its next tasks: an episode's call, or with None the closing of a number."""
    at: deque[Task] = field(default_factory=deque)
    """Tasks that it got and has not answered."""

    def late(self, now: float) -> bool:
        """Whether it should have answered."""
        return self.deadline <= now and (bool(self.at) or not self.ready)

    def at_work(self) -> list[EpisodeEnvironment | None]:
        """The episodes for which it is at work: it answers each before it begins with the next."""
        if self.ready:
            return [self.at[0].episode] if self.at else []
        return [episode for _, episode in self.queue]

    def give(self, numbers: Iterator[int]) -> None:
        """Let it do what is next, where it has little or nothing to do; OSError where it is gone.

        Args:
            numbers: of the tasks.
        """
        if not self.ready or len(self.at) > _AHEAD // 2:
            return
        given = list(self._next_tasks(numbers))
        if not given:
            return
        if not self.at:
            self.deadline = time.monotonic() + self.deadlines.of(given[0].call)
        self.at.extend(given)
        self.process.connection.send_bytes(pickle.dumps([(one.task, one.number, one.call) for one in given]))

    def _next_tasks(self, numbers: Iterator[int]) -> Iterator[Task]:
        """Tasks taken out of the queue: one of any size where it has nothing to do, else those that have room."""
        count, size = len(self.at), sum(one.size for one in self.at)
        while self.queue:
            number, episode = self.queue[0]
            call = Close() if episode is None else episode.call()
            task = Task(next(numbers), number, episode, call, _size(call))
            count, size = count + 1, size + task.size
            if count > 1 and (count > _AHEAD or size > _AHEAD_BYTES):
                return
            self.queue.popleft()
            yield task

    def answered(self, message: list[object]) -> tuple[Task, Began | Stepped | str | None]:
        """The task that it was at, and its answer: text for a failure, None for a closing.

        Raises:
            ValueError, TypeError: it is no answer.
        """
        task, kind, value = message
        if not self.at or task != self.at[0].task:
            raise ValueError(f"task {task!r}")
        answer = _received(self.at[0].call, kind, value)
        done = self.at.popleft()
        if self.at:
            self.deadline = time.monotonic() + self.deadlines.of(self.at[0].call)
        return done, answer


def _received(call: Call, kind: object, value: object) -> Began | Stepped | str | None:
    """An answer as a host sent it, which runs code that nobody checked."""
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
