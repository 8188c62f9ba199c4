"""A process that dies while a job starts, or in a step, ends it with that process's name, Ray's own processes too."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from jobs import Started, events, finish, manifest, start, wait_for
from support.samples import ALL, SEED

from rljob_worker.cluster.calls import Call, Calls
from rljob_worker.cluster.ray_watch import ClusterLook, RayWatch, dead_process
from rljob_worker.errors import JobError, RayLostError

NAMES = {
    "raylet": "Ray's raylet was killed by signal 9",
    "gcs_server": "Ray's gcs_server was killed by signal 9",
    "trainer-0": "trainer-0 died",
    "engine-0": "engine-0 died",
}
RAYS_WORDS = "Raylet is terminated. Termination is unexpected."
EVERY = [(name, when) for when in ("start", "step") for name in NAMES]
KILLS = EVERY if ALL else [random.Random(SEED).choice([("raylet", "start"), ("gcs_server", "start")])]


def test_a_dead_process_is_named() -> None:
    with subprocess.Popen(["sleep", "60"]) as one, subprocess.Popen(["sh", "-c", "exit 3"]) as other:
        assert dead_process([("raylet", one)]) == ""
        other.wait()
        assert dead_process([("raylet", one), ("gcs_server", other)]) == "Ray's gcs_server ended with exit code 3"
        one.kill()
        one.wait()
        assert dead_process([("raylet", one)]) == "Ray's raylet was killed by signal 9"


def test_whoever_waits_hears_of_it_and_else_the_process_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rljob_worker.cluster.ray_watch._POLL_SECONDS", 0.01)
    monkeypatch.setattr("rljob_worker.cluster.ray_watch._END_SECONDS", 0.05)
    ended: list[str] = []
    watch = RayWatch(ended.append)
    with watch.running():
        time.sleep(0.05)
        watch.check_now()
        watch.begin(lambda: "the raylet is gone")
        with pytest.raises(RayLostError, match="the raylet is gone"):
            watch.check_now()
        assert str(watch.cause_of(JobError("engine-0 died"))) == "the raylet is gone"
        wait_for(lambda: ended, "the end", 60)
    assert ended == ["the raylet is gone"]
    ended.clear()
    watch = RayWatch(ended.append)
    with watch.running():
        watch.begin(lambda: "the raylet is gone")
        wait_for(lambda: watch.lost, "a look", 60)
        watch.close()
        time.sleep(0.1)
    assert not ended


def test_a_wait_ends_with_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.wait", lambda refs, **_: ([], refs))
    watch = RayWatch(lambda lost: None)
    watch.begin(lambda: "Ray's raylet was killed by signal 9")
    calls = Calls(threading.Event(), lambda: None, str, lambda what: None, ray_watch=watch)
    waiting: Call[None] = Call("trainer-0", object())
    for one in (calls, calls.beside(threading.Event(), lambda: None)):
        with watch.running(), pytest.raises(RayLostError, match=r"start: Ray's raylet was killed by signal 9"):
            one.gather("start", [waiting], 1800.0)


def test_a_cluster_is_lost_when_it_refuses_and_not_when_it_is_silent(tmp_path: Path) -> None:
    path = str(tmp_path / "raylet")
    with socket.socket(socket.AF_UNIX) as raylet, socket.socket() as gcs:
        raylet.bind(path)
        raylet.listen()
        gcs.bind(("127.0.0.1", 0))
        gcs.listen()
        address = f"127.0.0.1:{gcs.getsockname()[1]}"
        look = ClusterLook(address, path)
        assert [look() for _ in range(20)] == [""] * 20
        gcs.close()
        assert [look() for _ in range(10)] == [*[""] * 9, f"the GCS of the Ray cluster is gone ({address} refuses)"]
        raylet.close()
        assert look() == f"the raylet of this node is gone ({path} refuses)"


def pid_of(driver: Started, name: str, folder: Path) -> int:
    """One of Ray's processes of a driver, or the writer of that process's log."""
    if name in ("raylet", "gcs_server"):
        for child in psutil.Process(driver.pid).children():
            with suppress(psutil.NoSuchProcess):
                if child.name() == name:
                    return child.pid
    log = folder / "logs" / f"{name}.log"
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and (entry / "fd" / "1").samefile(log):
                return int(entry.name)
    raise AssertionError(f"nobody writes {log}")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "when"), KILLS)
def test_a_job_ends_with_the_name_of_what_died(tmp_path: Path, name: str, when: str) -> None:
    folder = tmp_path / "run"
    process = start("run", manifest(tmp_path, steps=5000), "--output", folder)
    # The engine's actor is there: all processes are being built, which takes seconds.
    for one in ("engine-0", "trainer-0"):
        wait_for(lambda log=folder / "logs" / f"{one}.log": log.exists(), f"{one} that starts")
    if when == "step":
        wait_for(lambda: any(one["event"] == "ready" for one in events(folder)), "the first step")
    os.kill(pid_of(process, name, folder), signal.SIGKILL)
    code, output = finish(process)
    # In a call to a raylet that is gone Ray may end the driver first, with words of its own.
    by_ray = (name, when) == ("raylet", "step") and RAYS_WORDS in output
    assert (code, by_ray or NAMES[name] in output) == (1, True), output
    if by_ray:
        return
    assert NAMES[name] in next(one["message"] for one in events(folder) if one["event"] == "failed")
