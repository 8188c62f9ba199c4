"""A Ray of the job's own asks for a token of its own; one that is there is asked with its owner's."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray
from adding_role import ADDER, Adder
from jobs import alive, wait_for
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from support.children import Children
from support.children import children as children
from support.ports import free_port

from rljob_api import RLJobSpec
from rljob_worker.cluster import ray_session
from rljob_worker.cluster.groups import Group
from rljob_worker.cluster.placement import Spot
from rljob_worker.cluster.processes import Place, Processes
from rljob_worker.cluster.ray_session import connected, embedded
from rljob_worker.errors import JobError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TOKEN = "that-of-the-cluster-which-was-there-before"
SPEC = RLJobSpec.model_validate(
    {
        "steps": 1,
        "model": {"path": "/model"},
        "data": {"path": "/data.jsonl"},
        "reward": {"name": "match"},
        "rollout": {"promptsPerStep": 4, "samplesPerPrompt": 2, "maxResponseTokens": 8},
        "resources": {"profile": "cpu"},
    }
)


def answering(port: int) -> bool:
    time.sleep(0.1)
    with socket.socket() as client:
        return not client.connect_ex(("127.0.0.1", port))


@pytest.fixture
def address() -> Iterator[str]:
    """A Ray cluster that asks for TOKEN."""
    folder = Path(tempfile.mkdtemp(prefix="rc-", dir="/tmp"))
    ray_command = [sys.executable, "-m", "ray.scripts.scripts"]
    port = free_port()
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [*ray_command, "start", "--head", "--num-cpus=1", f"--port={port}", "--include-dashboard=false"]
    command += [f"--temp-dir={folder}", f"--dashboard-agent-listen-port={free_port()}", "--block"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        while not answering(port):
            assert process.poll() is None, (folder / "log").read_text()
        yield f"127.0.0.1:{port}"
        process.terminate()
        process.wait(30)
    shutil.rmtree(folder, ignore_errors=True)


def test_a_ray_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logs go with its folder, so that the message has them."""

    def init(_temp_dir: str, **settings: object) -> None:
        logs = Path(_temp_dir) / "session_latest" / "logs"
        logs.mkdir(parents=True)
        (logs / "raylet.out").write_text("earlier\n" * 20 + "cannot bind to port 7\n")
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(JobError) as error, embedded(SPEC):
        pass
    first, *lines = str(error.value).splitlines()
    assert first == "start: Ray does not start on this machine: The current node timed out during startup."
    assert len(lines) == 10
    assert lines[-1] == "  raylet.out | cannot bind to port 7"


def test_what_takes_connections_and_is_no_ray_is_named_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.init` would try it for a quarter of an hour."""
    monkeypatch.setattr(ray_session, "_ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(JobError, match=rf"RAY_ADDRESS\): no Ray cluster answers at {place}: .* 0\.5 s"):
            connected(place).__enter__()


def ray_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}


def test_each_ray_has_its_own_token(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    before = ray_settings()
    with embedded(SPEC) as session:
        assert session.scratch is not None
        token = session.scratch / "token"
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert len(token.read_text()) == 64

        @ray.remote
        def environment() -> dict[str, str]:
            return dict(os.environ)

        values = ray.get(environment.remote(), timeout=60).values()
        assert not [value for value in values if TOKEN in value or token.read_text() in value]
    assert ray_settings() == before

    with connected(address):
        assert len(ray.nodes()) == 1

    monkeypatch.setenv("RAY_AUTH_TOKEN", "a stranger's")
    AuthenticationTokenLoader.instance().reset_cache()
    with pytest.raises(JobError, match="RAY_AUTH_TOKEN"), connected(address):
        pass


def test_a_role_is_a_class_and_a_child_that_fails_is_seen_to_fail(tmp_path: Path) -> None:
    with embedded(SPEC):
        assert subprocess.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode == 3
        bundle = ray.util.placement_group([{"CPU": 1}])
        processes, adders = Processes(SPEC, tmp_path), Group[Adder]()
        for number in range(2):
            place = Place(Spot(bundle, 0), node=0, devices=1)
            adders.add(processes.make(ADDER, f"adder-{number}", place, {"start": number}))
        sums = ray.get([call.ref for call in adders.call(Adder.add, 5)], timeout=60)
        assert [one.value for one in sums] == [5, 6]
        assert [one.value for one in ray.get([call.ref for call in adders.variable("ADDS")], timeout=60)] == ["yes"] * 2
        assert (tmp_path / "logs" / "adder-1.log").exists()


def test_an_embedded_ray_has_no_process_that_nobody_asks(monkeypatch: pytest.MonkeyPatch, children: Children) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of-the-shell")
    with embedded(SPEC) as session:
        assert os.environ["HF_TOKEN"] == session.secrets["HF_TOKEN"] == "hf_of-the-shell"
        told = []
        for process in children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                told.append(process.environ())
        assert told
        assert not [variables for variables in told if "hf_of-the-shell" in variables.values()]
        # Of the raylet's own children Ray needs all.
        commands = [" ".join(child.cmdline()) for child in children()]
        ray_processes = [command for command in commands if str(session.scratch) in command]
        assert len(ray_processes) == 2, ray_processes
        assert all("gcs_server" in command or "raylet" in command for command in ray_processes)
        raylet = next(child for child in children() if child.name() == "raylet")

        @ray.remote
        class Actor:
            def pid(self) -> int:
                return os.getpid()

        actor = Actor.options(runtime_env={"env_vars": {"OF_ITS": "OWN"}}).remote()
        pid = ray.get(actor.pid.remote(), timeout=60)
        of_raylet = {child.pid: child.name() for child in raylet.children()}
        assert len(of_raylet) == 3, of_raylet
        names = sorted(name for number, name in of_raylet.items() if number != pid)
        assert names == ["cat", "ray::RuntimeEnvAgent"], "the first in the place of the dashboard's agent"
        own = [psutil.Process(number) for number in of_raylet if number != pid]
        served = [place for process in own for place in process.net_connections() if place.status == "LISTEN"]
        assert len(served) == 1, served


def test_what_stands_for_the_agent_ends_with_a_killed_raylet(children: Children) -> None:
    with embedded(SPEC):
        raylet = next(child for child in children() if child.name() == "raylet")
        (agent,) = (child for child in raylet.children() if child.name() == "cat")
        raylet.kill()
        # Its pipe closes with the last of the raylet's children. Whoever takes it in may leave it a zombie.
        wait_for(lambda: not alive(agent.pid), "the end of what stands for the agent", 60, 0.1)
