"""Requests of a generation that takes more of them while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, TypeAlias, TypeVar

from rljob_worker.engine.engine import Chunk
from rljob_worker.flow.occupancy import Occupancy
from rljob_worker.types import Generation, GenerationRequest

K = TypeVar("K")
Wanted: TypeAlias = Mapping[int, Sequence[tuple[K, GenerationRequest]]]
"""Keys and requests, by engine."""
More: TypeAlias = Callable[[Sequence[int | None]], Wanted[K] | None]
"""From the responses that each engine still owes, None where it is gone, to what they are asked for further; None:
nothing, ever."""
Send: TypeAlias = Callable[[str, list[GenerationRequest], bool], list[bool] | None]


class Asked(Generic[K]):
    """Requests of each engine in the order in which it got them. One thread calls.

    Args:
        names: of the engines; one that is lost meanwhile keeps its number here.
        occupancy: counts requests and responses.
        shares: for each engine, keys and requests to begin with.
        more: gives what follows.
        send: gives an engine requests, by its name, or says to all that none follow; returns whether each takes them,
            None where one died.
    """

    def __init__(
        self,
        names: Sequence[str],
        occupancy: Occupancy,
        shares: Sequence[Sequence[tuple[K, GenerationRequest]]],
        more: More[K],
        send: Send,
    ) -> None:
        self._names, self._occupancy, self._more, self._send = names, occupancy, more, send
        self._given = [list(share) for share in shares]
        self.left = [len(share) for share in shares]
        """Responses that each engine still owes."""
        self._held_back: dict[int, list[tuple[K, GenerationRequest]]] = {}
        """Requests for engines that have not begun to take any."""
        self._begun: set[int] = set()
        self._lost: set[int] = set()
        self._harvested: set[int] = set()
        self._closed = False

    def begin(self) -> list[list[GenerationRequest]]:
        """Count the first requests; for each engine, they."""
        for name, count in zip(self._names, self.left):
            self._occupancy.given(name, count, time.monotonic())
        return [[request for _, request in share] for share in self._given]

    def came(self, engine: int, chunk: Chunk) -> list[tuple[K, Generation]]:
        """Responses with the keys of their requests; the first of an engine says that it takes more."""
        self._begun.add(engine)
        self.left[engine] -= len(chunk)
        self._occupancy.came(self._names[engine], len(chunk), time.monotonic())
        return [(self._given[engine][index][0], generation) for index, generation in chunk]

    def lost(self, name: str) -> bool:
        """Leave an engine out that died; False where that is known."""
        engine = self._names.index(name)
        if engine in self._lost:
            return False
        self._lost.add(engine)
        self.left[engine] = 0
        self._occupancy.lost(name, time.monotonic())
        return True

    def look(self) -> Collection[int]:
        """Ask for what follows; engines that owe nothing, and are to wait for it."""
        if self._closed:
            return ()
        left = [None if engine in self._lost else count for engine, count in enumerate(self.left)]
        for engine, held in self._held_back.items():
            left[engine] = None if left[engine] is None else self.left[engine] + len(held)
        wanted = self._more(left)
        for engine, requests in () if wanted is None else wanted.items():
            self._held_back.setdefault(engine, []).extend(requests)
        alive = set(range(len(self._names))) - self._lost
        for engine in list(self._held_back):
            if engine in self._begun or engine not in alive:
                self._ask(engine, self._held_back.pop(engine))
        if wanted is None and alive <= self._begun:
            self._closed = True
            self._send("", [], True)
            return ()
        return [engine for engine, count in enumerate(self.left) if not count]

    def _ask(self, engine: int, requests: Sequence[tuple[K, GenerationRequest]]) -> None:
        if engine in self._lost or engine in self._harvested or not requests:
            return
        taken = self._send(self._names[engine], [request for _, request in requests], False)
        if taken is None:
            return
        if not all(taken):
            self._harvested.add(engine)
            return
        self._given[engine] += requests
        self.left[engine] += len(requests)
        self._occupancy.given(self._names[engine], len(requests), time.monotonic())
