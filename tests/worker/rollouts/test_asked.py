"""Engines that are asked for more while they generate: what they owe, and those that are lost or harvested."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rljob_worker.errors import JobError, ProcessDiedError
from rljob_worker.rollouts.generator import Generator
from rljob_worker.types import Generation, GenerationRequest, SamplingParams

DONE = Generation(np.array([1]), np.zeros(1, np.float32), "stop")


class Engines(list[Any]):
    """Two engines that note what they are asked for; `takes` says what they answer."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(name=f"engine-{number}") for number in range(2))
        self.asked: list[tuple[str, int, bool]] = []
        self.takes: dict[str, object] = {}

    def generate(self, shares: Sequence[Any], sampling: Any, version: int, *, more: bool) -> list[int]:
        assert more
        return [len(share) for share in shares]

    def submit(self, engine: str, requests: Sequence[Any], *, last: bool) -> list[object]:
        self.asked.append((engine, len(requests), last))
        return [self.takes.get(engine, True)]

    def on_loss(self, error: ProcessDiedError) -> None: ...


class Occupancy:
    def __init__(self) -> None:
        self.owed = {"engine-0": 0, "engine-1": 0}

    def given(self, name: str, count: int, now: float) -> None:
        self.owed[name] += count

    def came(self, name: str, count: int, now: float) -> None:
        self.owed[name] -= count

    def lost(self, name: str, now: float) -> None:
        del self.owed[name]


class Calls:
    """Plays the items of a stream: a chunk of an engine's answers, by their places, an error, or a look alone."""

    def __init__(self, items: Sequence[tuple[int, Sequence[int]] | ProcessDiedError | None]) -> None:
        self.items, self.idle = items, list[list[int]]()

    def stream(self, what: str, calls: Any, *, each: bool, lost: Any, beside: Any) -> Iterator[Any]:
        for item in self.items:
            self.idle.append(list(beside()))
            if isinstance(item, ProcessDiedError):
                lost(item)
            elif item is not None:
                yield item[0], [(place, DONE) for place in item[1]]
        self.idle.append(list(beside()))

    def gather(self, what: str, calls: Sequence[Any]) -> list[Any]:
        for answer in calls:
            if isinstance(answer, ProcessDiedError):
                raise answer
        return list(calls)

    def phase(self, otherwise: str) -> str:
        return otherwise


def requests(*names: str) -> list[tuple[str, GenerationRequest]]:
    return [(name, GenerationRequest((1,), 0)) for name in names]


class World:
    """A generation whose wanted requests are those of `wanted`, one of them a look."""

    def __init__(self, items: Sequence[Any], wanted: Sequence[dict[int, Any] | None]) -> None:
        self.engines, self.calls, self.occupancy = Engines(), Calls(items), Occupancy()
        self.wanted, self.left = iter(wanted), list[list[int | None]]()

    def more(self, left: Sequence[int | None]) -> dict[int, Any] | None:
        self.left.append(list(left))
        return next(self.wanted)

    def run(self, lost: list[str] | None = None) -> list[str]:
        fakes: Any = SimpleNamespace(), self.engines, self.calls
        occupancy: Any = self.occupancy
        shares = [requests("a"), []]
        chunks = Generator(*fakes).going_on(
            shares,
            SamplingParams(1),
            0,
            occupancy,
            more=self.more,
            lost=lost,
        )
        return [key for chunk in chunks for key, _ in chunk]


def test_what_follows_is_asked_for_once_an_engine_takes_it() -> None:
    wanted = [{1: requests("b")}, {}, {0: requests("c")}, {}, None]
    world = World([None, (1, []), (0, [0]), (1, [0]), (0, [1])], wanted)
    assert world.run() == ["a", "b", "c"]
    assert world.left == [[1, 0], [1, 1], [1, 1], [1, 1], [1, 0]]
    assert world.engines.asked == [("engine-1", 1, False), ("engine-0", 1, False), ("", 0, True)]
    assert world.calls.idle[0] == [1], "it is not late"
    assert world.calls.idle[-1] == [], "all are to end"
    assert world.occupancy.owed == {"engine-0": 0, "engine-1": 0}


@pytest.mark.parametrize("noticed", ["by its stream", "by what it is asked"])
def test_the_others_go_on_without_an_engine_that_died(noticed: str) -> None:
    died = ProcessDiedError("engine-1 died", "engine-1")
    second = died if noticed == "by its stream" else None
    wanted = [{}, {1: requests("b")}, {}, {1: requests("d")}, None, None]
    world = World([(1, []), second, died, (0, [0]), None], wanted)
    world.engines.takes["engine-1"] = died
    lost = list[str]()
    assert world.run(lost) == ["a"]
    assert lost == ["engine-1"]
    assert world.left[-1] == [0, None], "nobody waits for what it owed"
    assert "engine-1" not in world.occupancy.owed
    with pytest.raises(ProcessDiedError):
        World([(1, []), died], [{}, {}, {}]).run()


def test_an_engine_that_was_harvested_is_asked_for_nothing_more() -> None:
    world = World([(0, []), (1, []), None, (0, [0])], [{}, {}, {1: requests("b")}, {1: requests("c")}, None])
    world.engines.takes["engine-1"] = False
    assert world.run() == ["a"]
    assert [asked for asked in world.engines.asked if asked[1]] == [("engine-1", 1, False)]


def test_responses_that_do_not_come_are_counted() -> None:
    with pytest.raises(JobError, match="the engines returned 1 response less than they were asked for"):
        World([(0, []), (1, [])], [{}, {}, None]).run()
