"""Pace `Free`: what engines are asked for next, as soon as environments have answered."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from rljob_worker.rollouts.policies.base import Assignment
from rljob_worker.rollouts.turns import Sample
from rljob_worker.types import GenerationRequest

Asked: TypeAlias = list[tuple[Sample, GenerationRequest]]


class FreePace:
    """Gives engines the next turns of their own groups; groups that wait go to the engine that has room.

    Args:
        assignment: which engine has which groups.
        sequences: that an engine runs at once.
        missing: what engines are asked for to go on with a group.
        said: takes what environments have said until now; what follows from it.
        outstanding: whether an environment is asked for something.
        waited: called with seconds in which no engine had anything to do, and an environment had.
        paused: whether engines are harvested: they are asked for nothing more.
    """

    def __init__(
        self,
        assignment: Assignment,
        sequences: int,
        *,
        missing: Callable[[int], Asked],
        said: Callable[[], Asked],
        outstanding: Callable[[], bool],
        waited: Callable[[float], None],
        paused: Callable[[], bool],
    ) -> None:
        self._engine_of = {one: engine for engine, ordinals in enumerate(assignment.held) for one in ordinals}
        self._waiting, self._sequences = deque(assignment.waiting), sequences
        self._missing, self._said, self._outstanding = missing, said, outstanding
        self._waited, self._paused = waited, paused
        self._idle_since: float | None = None

    def more(self, left: Sequence[int | None]) -> dict[int, Asked] | None:
        """Requests that engines get now; None: nothing more, ever.

        Args:
            left: responses that each engine still owes; None: it is gone.
        """
        if self._paused():
            self._count(idle=False)
            return None
        self._count(idle=not any(left) and self._outstanding())
        wanted: dict[int, Asked] = {}
        for key, request in self._said():
            if (engine := self._engine_of.get(key[0])) is not None:
                wanted.setdefault(engine, []).append((key, request))
        for engine, owed in enumerate(left):
            if owed is None:
                continue
            free = self._sequences - owed - len(wanted.get(engine, ()))
            while self._waiting and free > 0:
                ordinal = self._waiting.popleft()
                self._engine_of[ordinal] = engine
                requests = self._missing(ordinal)
                wanted.setdefault(engine, []).extend(requests)
                free -= len(requests)
        done = not any(wanted.values()) and not any(left) and not self._outstanding()
        if done:
            self._count(idle=False)
        return None if done else wanted

    def _count(self, *, idle: bool) -> None:
        now = time.perf_counter()
        if self._idle_since is not None:
            self._waited(now - self._idle_since)
        self._idle_since = now if idle else None
