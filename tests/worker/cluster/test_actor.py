"""Calls inside a process of a role, and how they are started."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from rljob_worker.cluster import actor
from rljob_worker.cluster.actor import Actor, share
from rljob_worker.cluster.groups import Group, Process
from rljob_worker.errors import JobError, StopRequested, UserError
from rljob_worker.types import TrainBatch


class Adder:
    """Adds to what it began with."""

    made = 0

    def __init__(self, *, start: int) -> None:
        if start < 0:
            raise ValueError("start is negative")
        type(self).made += 1
        self.value = start
        self.kept: object = None

    def add(self, number: int, *, times: int = 1) -> int:
        self.value += number * times
        return self.value

    def count(self, until: int) -> Iterator[int]:
        yield from range(until)

    def keep(self, batch: TrainBatch) -> int:
        self.kept = batch
        return len(batch.tokens)

    def drop(self) -> None:
        self.kept = None

    def busy_seconds(self) -> float:
        return self.value / 2


Make = Callable[[int], Actor]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    # It would redirect the output of the tests.
    monkeypatch.setattr(actor, "prepare_process", lambda log_file, stacks_file: 1)
    monkeypatch.setattr(Adder, "made", 0)
    return lambda start: Actor("log", "stacks", f"{__name__}:{Adder.__qualname__}", {"start": start}, {})


def test_the_first_call_makes_the_object_and_says_what_is_wrong_with_its_arguments(make: Make) -> None:
    process = make(3)
    assert Adder.made == 0
    assert process.call("add", 2, times=2) == actor.Reply(7, 3.5)
    assert process.call("add", 1).value == 8
    assert Adder.made == 1
    with pytest.raises(ValueError, match="start is negative"):
        make(-1).call("add", 2)


def test_an_error_that_was_not_foreseen_leaves_its_traceback_in_the_log(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(cause: Exception) -> None:
        raise RuntimeError("the layer cannot be swapped") from cause

    process = make(3)
    process.call("add", 1)
    for error in (StopRequested(), JobError("a loss is NaN"), UserError("spec.steps: 0")):
        process._object.fails = lambda error=error: (_ for _ in ()).throw(error)
        with pytest.raises(type(error)):
            process.call("fails")
    assert capfd.readouterr().err == ""
    process._object.fails = lambda: fails(ValueError("two references"))
    for run in (process.call, lambda method: list(process.stream(method))):
        with pytest.raises(RuntimeError, match="swapped"):
            run("fails")
        said = capfd.readouterr().err
        assert "ValueError: two references" in said
        assert "RuntimeError: the layer cannot be swapped" in said


def test_nothing_is_done_beside_before_the_first_call(make: Make) -> None:
    process = make(3)
    assert process.beside("add", 1).value is None
    assert Adder.made == 0
    process.call("add", 0)
    assert process.beside("add", 1).value == 4


def test_a_stream_replies_with_each_item(make: Make) -> None:
    assert [reply.value for reply in make(0).stream("count", 3)] == [0, 1, 2]


def test_a_shared_value_is_read_once_for_as_long_as_the_object_keeps_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []

    def get(ref: object) -> TrainBatch:
        reads.append(ref)
        one = np.ones(1, dtype=np.int64)
        return TrainBatch.of_responses([one, one], np.ones(2, np.int64), [np.zeros(0, np.float32)] * 2, np.zeros(2))

    ref = SimpleNamespace(hex=lambda: "ab")
    monkeypatch.setattr(ray, "put", lambda value: ref)
    monkeypatch.setattr(ray, "get", get)
    process, shared = make(0), share(object())
    assert [process.call("keep", shared).value for _ in range(3)] == [2, 2, 2]
    assert reads == [ref]
    process.call("drop")
    gc.collect()
    process.call("keep", shared)
    assert reads == [ref, ref]


class Handle:
    """An actor whose calls are noted."""

    def __init__(self) -> None:
        self.started: list[tuple[Any, ...]] = []

    def __getattr__(self, way: str) -> Any:
        def options(**options: object) -> Any:
            return SimpleNamespace(remote=lambda *args, **kwargs: self.started.append((way, options, args, kwargs)))

        return SimpleNamespace(options=options)


def test_a_group_starts_a_method_on_each_member_under_its_name() -> None:
    handles: list[Any] = [Handle(), Handle()]
    adders = Group[Adder]()
    for number, handle in enumerate(handles):
        adders.add(Process(f"adder-{number}", handle, node=0))
    assert [call.process for call in adders.call(Adder.add, 2, times=3)] == ["adder-0", "adder-1"]
    adders.beside(Adder.drop)
    adders[1].stream(Adder.count, 4)
    assert handles[0].started == [
        ("call", {"name": "adder-0.add"}, ("add", 2), {"times": 3}),
        ("beside", {"name": "adder-0.drop", "concurrency_group": "control"}, ("drop",), {}),
    ]
    assert handles[1].started[2] == ("stream", {"name": "adder-1.count", "num_returns": "streaming"}, ("count", 4), {})
