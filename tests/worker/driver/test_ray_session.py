"""A Ray of the job's own asks for a token of its own; one that is there is asked with its owner's."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from support.ports import free_port

from rljob_api import RLJobSpec
from rljob_worker.driver.ray_session import connected, embedded
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
        yield f"127.0.0.1:{port}"
        process.terminate()
        process.wait(30)
    shutil.rmtree(folder, ignore_errors=True)


def test_a_ray_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logs go with its folder, so that they are told."""

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


def test_a_child_that_fails_is_seen_to_fail() -> None:
    with embedded(SPEC):
        assert subprocess.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode == 3


def test_an_embedded_ray_has_no_process_that_nobody_asks() -> None:
    with embedded(SPEC) as session:
        # Of the raylet's own children Ray needs all.
        children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
        commands = [" ".join(child.cmdline()) for child in children]
        ray_processes = [command for command in commands if str(session.scratch) in command]
        assert len(ray_processes) == 2, ray_processes
        assert all("gcs_server" in command or "raylet" in command for command in ray_processes)
        raylet = next(child for child in children if child.name() == "raylet")

        @ray.remote
        class Actor:
            def pid(self) -> int:
                return os.getpid()

        actor = Actor.options(runtime_env={"env_vars": {"OF_ITS": "OWN"}}).remote()
        pid = ray.get(actor.pid.remote(), timeout=60)
        of_raylet = {child.pid: child.name() for child in raylet.children()}
        agents = {number: name for number, name in of_raylet.items() if "Agent" in name}
        assert of_raylet.keys() - agents.keys() == {pid}, of_raylet
        served = [c for number in agents for c in psutil.Process(number).net_connections() if c.status == "LISTEN"]
        assert len(served) == len(agents), (agents, served)


def test_an_embedded_ray_starts_before_its_agent() -> None:
    """Its raylet waits 15 seconds for an agent's ports, and dies."""
    stopped: list[psutil.Process] = []
    ended = threading.Event()

    def stop_agent() -> None:
        while not stopped and not ended.wait(0.01):
            stopped.extend(agent for agent in psutil.Process().children(recursive=True) if _is_agent(agent))
        for agent in stopped:
            agent.suspend()

    thread = threading.Thread(target=stop_agent)
    thread.start()
    try:
        with embedded(SPEC):
            thread.join(30)
            assert [agent.status() for agent in stopped] == [psutil.STATUS_STOPPED]

            @ray.remote
            class Actor:
                def ping(self) -> str:
                    return "pong"

            assert ray.get(Actor.remote().ping.remote(), timeout=60) == "pong"
    finally:
        ended.set()
        for agent in stopped:
            agent.resume()


def _is_agent(process: psutil.Process) -> bool:
    try:
        return process.name() != "raylet" and any(part.endswith("dashboard/agent.py") for part in process.cmdline())
    except psutil.Error:
        return False
