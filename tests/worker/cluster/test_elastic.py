"""Engines present while some are lost and others come."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from test_run_folder import job as described

from rljob_worker.cluster import elastic
from rljob_worker.cluster.calls import Call
from rljob_worker.cluster.elastic import Elastic
from rljob_worker.cluster.groups import EngineGroup, Process
from rljob_worker.errors import JobError, ProcessDiedError, StopRequested


class Engines(EngineGroup):
    def locate(self) -> list[Call[Any]]:
        return [Call(process.name, None) for process in self.processes]


class Answers:
    """Answers of engines that are asked whether they are there."""

    def __init__(self) -> None:
        self.dead: set[str] = set()

    def gather(self, what: str, calls: Sequence[Call[Any]]) -> list[None]:
        for call in calls:
            if call.process in self.dead:
                raise died(call.process)
        return [None for _ in calls]


def died(name: str) -> ProcessDiedError:
    return ProcessDiedError(f"rollout: {name} died", name)


class Engineless(Elastic):
    """Makes and ends engines that are names alone."""

    def __init__(self, processes: Any, make: Any, on_change: Any) -> None:
        nothing: Any = None
        super().__init__(processes, nothing, nothing, {}, nothing, on_change)
        self._make = make  # type: ignore[method-assign]
        self.ended: list[str] = []

    def _end(self, process: Process[Any]) -> None:
        self.ended.append(process.name)


class Job:
    """Engines that come and go, what was made and what was said."""

    def __init__(self, engines: int, make: Any = None) -> None:
        self.engines, self.answers = Engines(), Answers()
        for number in range(engines):
            self.engines.add(process(f"engine-{number}"))
        self.said: list[tuple[str, Any]] = []
        self.may_come = threading.Event()
        processes = SimpleNamespace(spec=described().spec, engines=self.engines)
        self.pool = Engineless(processes, make or self._make, lambda event, **about: self.said.append((event, about)))

    def _make(self, name: str, over: threading.Event) -> Process[Any] | None:
        while not self.may_come.wait(0.01):
            if over.is_set():
                return None
        return process(name)

    def names(self) -> list[str]:
        return [one.name for one in self.engines]

    def settle(self) -> bool:
        """Whether they are others than before."""
        calls: Any = self.answers
        self.pool.admit(calls)
        return self.pool.take_changed()


def process(name: str) -> Process[Any]:
    handle: Any = None
    return Process(name, handle, node=0)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_others_go_on_and_a_new_one_takes_part_from_the_next_hand_over_on() -> None:
    job = Job(3)
    assert not job.settle(), "nobody came or went"
    job.pool.lose(died("engine-1"))
    assert job.names() == ["engine-0", "engine-2"]
    assert job.settle(), "they are others than before"
    assert not job.settle()
    job.may_come.set()
    wait_until(lambda: job.pool.arrived)
    assert job.names() == ["engine-0", "engine-2"], "not in the midst of a step"
    assert job.settle()
    assert sorted(job.names()) == ["engine-0", "engine-1", "engine-2"]
    assert job.said == [("engine_lost", {"engine": "engine-1", "left": 2}), ("engine_joined", {"engine": "engine-1"})]


def test_one_that_died_unseen_is_found_before_a_hand_over() -> None:
    job = Job(2)
    job.answers.dead = {"engine-0"}
    assert job.settle()
    assert job.names() == ["engine-1"]
    job.pool.close()


@pytest.mark.parametrize("name", ["engine-0", "trainer-0"])
def test_the_last_engine_and_whoever_is_none_are_not_done_without(name: str) -> None:
    job = Job(1 if name == "engine-0" else 2)
    with pytest.raises(ProcessDiedError, match=name):
        job.pool.lose(died(name))
    assert job.said == []


def test_one_that_does_not_start_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "_AGAIN_SECONDS", 0.01)
    tries: list[str] = []

    def make(name: str, over: threading.Event) -> Process[Any]:
        tries.append(name)
        if len(tries) < 3:
            raise JobError("no memory")
        return process(name)

    job = Job(2, make)
    job.pool.lose(died("engine-1"))
    wait_until(lambda: job.pool.arrived)
    assert tries == ["engine-1"] * 3


@pytest.mark.parametrize("ends", ["returns", "raises"])
def test_no_more_are_made_once_the_job_ends(ends: str) -> None:
    ended = threading.Event()

    def make(name: str, over: threading.Event) -> Process[Any] | None:
        over.wait(60)
        ended.set()
        if ends == "raises":
            raise StopRequested
        return None

    job = Job(2, make)
    job.pool.lose(died("engine-1"))
    job.pool.close()
    assert ended.wait(60)
    time.sleep(0.05)
    assert job.pool.arrived == []


def test_one_that_is_not_needed_leaves_and_one_more_joins() -> None:
    job = Job(2)
    job.pool.release("engine-0")
    assert job.names() == ["engine-1"]
    assert job.pool.ended == ["engine-0"]
    assert job.settle()
    job.pool.add("engine-2")
    assert job.pool.made == ["engine-2"]
    job.may_come.set()
    wait_until(lambda: job.pool.arrived)
    assert job.pool.made == []
    assert job.settle()
    assert job.names() == ["engine-1", "engine-2"]
    assert job.said == [("engine_left", {"engine": "engine-0", "left": 1}), ("engine_joined", {"engine": "engine-2"})]


def test_one_that_is_not_needed_any_more_when_it_has_started_is_ended() -> None:
    job = Job(1)
    job.pool.add("engine-1")
    job.may_come.set()
    wait_until(lambda: job.pool.arrived)
    job.pool.release("engine-1")
    assert job.pool.arrived == []
    assert job.pool.ended == ["engine-1"]
    assert not job.settle()
    assert job.said == []


def test_one_that_starts_while_it_is_given_up_is_ended() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def make(name: str, over: threading.Event) -> Process[Any]:
        begun.set()
        go_on.wait(60)
        return process(name)

    job = Job(1, make)
    job.pool.add("engine-1")
    assert begun.wait(60)
    job.pool.release("engine-1")
    assert job.pool.made == []
    go_on.set()
    wait_until(lambda: job.pool.ended == ["engine-1"])
    assert job.pool.arrived == []
