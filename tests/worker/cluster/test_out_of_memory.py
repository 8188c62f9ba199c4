"""A process that Ray ended because the machine's memory ran out: what the user is told."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.exceptions

from rljob_worker.cluster.calls import Call, Calls
from rljob_worker.cluster.out_of_memory import in_short
from rljob_worker.errors import ProcessDiedError

# As Ray 2.60.0 writes it, seen with a threshold of 10%; figures and users are those of a run of examples/gsm8k.yaml.
# Lists of what was considered are left out.
MESSAGE = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 127.0.0.1, ID: 9181889d) "
    "was 22.27GB used / 23.54GB limit (0.946240)\nOOM kill reason: Memory usage 24017907712B exceeded threshold of "
    "24012259328B (95.0% of 25276063744B limit)\nObject store memory usage: [- objects spillable: 0\n"
    "- bytes spillable: 0\n]\nRay killed 1 worker(s) based on the killing policy\nTotal non-selected idle workers: 0\n"
    "Top 10 memory users: PID\tMEM(GB)\tCOMMAND\n10630\t13.29\tray::TrainerActor.train\n10656\t2.60\tray::EngineActor\n"
    "12571\t2.49\tray::EngineSide\n10279\t0.57\t/home/me/rljob/.venv/bin/python .venv/bin/rljob run "
    "examples/gsm8k.yaml --output runs/gsm8k\n12258\t0.31\tpython other.py\n10513\t0.08\tray::DashboardAgent\nRefer to "
    "the documentation on how to address the out of memory issue: https://docs.ray.io/en/latest/. To adjust the kill "
    "threshold, set `RAY_memory_usage_threshold`."
)


def test_it_is_short_and_says_who_held_the_memory() -> None:
    assert in_short(MESSAGE) == (
        "the machine's memory ran out: 22.27 of 23.54 GiB were in use, and Ray ends a process then. Most of it, in "
        "GiB: ray::TrainerActor.train 13.29 (pid 10630), ray::EngineActor 2.60 (pid 10656), ray::EngineSide 2.49 "
        "(pid 12571), /home/me/rljob/.venv/bin/python .venv/bin/rljob run examples 0.57 (pid 10279), "
        "python other.py 0.31 (pid 12258). End what else needs memory, or make the job smaller "
        "(`rljob plan` says what it needs)"
    )


def test_ray_still_writes_it_so() -> None:
    raylet = (Path(ray.__file__).parent / "core/src/ray/raylet/raylet").read_bytes()
    for form in (b"Memory on the node (IP: %s, ID: %s) was %sGB used / %sGB limit", b"Top 10 memory users: %s"):
        assert form in raylet, "in_short() and MESSAGE are for another Ray"


def test_another_message_stays_as_it_is() -> None:
    assert in_short("Task was killed due to the node running low on memory.") == (
        "Task was killed due to the node running low on memory."
    )


def test_the_one_who_asked_is_told_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(ref: Any) -> Any:
        raise ray.exceptions.OutOfMemoryError(MESSAGE)

    monkeypatch.setattr(ray, "get", ended)
    calls = Calls(threading.Event(), lambda: None, lambda name: f"{name} died", lambda what: None)
    with pytest.raises(ProcessDiedError) as caught:
        calls._value("update_weights", Call("engine-0", None), None)
    assert str(caught.value) == f"update_weights: engine-0 died\nOutOfMemoryError: {in_short(MESSAGE)}"
