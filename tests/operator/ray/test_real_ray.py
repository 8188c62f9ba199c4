"""The client of the job API against a real `ray start --head`, with and without token authentication."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from support.ports import free_port
from support.samples import unless_drawn

from rljob_operator.ray.http import NoAnswer
from rljob_operator.ray.jobs import RayJobs
from rljob_operator.state.observed import SubmissionState, SubmissionView

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]
TOKEN = "0123456789abcdef0123456789abcdef"
START_SECONDS = 180.0
JOB_SECONDS = 60.0
CALL_SECONDS = 60.0
END_SECONDS = 60.0


@pytest.fixture
def head(request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of a real head; the parameter is its token or None."""
    # Ray's sockets must have short paths.
    folder = Path(f"/tmp/rljob-head-{os.getpid()}-{time.monotonic_ns() % 10**6}")
    names = (
        "port",
        "dashboard-port",
        "dashboard-agent-listen-port",
        "node-manager-port",
        "object-manager-port",
        "ray-client-server-port",
    )
    ports = {name: free_port() for name in names}
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_DOCKER_CPU_WARNING": "1"}
    if request.param:
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": request.param}
    else:
        # Else Ray asks for the token that a script of this user may have left in its home folder.
        environment["RAY_AUTH_MODE"] = "disabled"
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--node-ip-address=127.0.0.1"]
    command += [f"--{name}={port}" for name, port in ports.items()]
    command += ["--num-cpus=1", "--num-gpus=0", "--object-store-memory=80000000", f"--temp-dir={folder}"]
    started = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = started.communicate(timeout=START_SECONDS)
        assert started.returncode == 0, said[-4000:]
        assert "dashboard" in said.lower(), said[-4000:]
        yield f"http://127.0.0.1:{ports['dashboard-port']}"
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        remove(folder)


def remove(folder: Path) -> None:
    """Remove a folder into which processes that were killed may write for a moment."""
    until = time.monotonic() + END_SECONDS
    while folder.exists():
        assert time.monotonic() < until, f"{folder} is still written to"
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


async def settled(ray: RayJobs, name: str, *states: SubmissionState) -> SubmissionView:
    until = time.monotonic() + JOB_SECONDS
    while True:
        view = await ray.get(name)
        if view.state in states:
            return view
        assert time.monotonic() < until, view
        await asyncio.sleep(0.3)


async def answering(ray: RayJobs) -> None:
    """Wait for the dashboard: `ray start` returns before it listens."""
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            assert (await ray.get("nobody")).state is SubmissionState.MISSING
            return
        except NoAnswer as error:
            if time.monotonic() > until:
                pytest.fail(str(error))
            await asyncio.sleep(0.3)


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(TOKEN, marks=unless_drawn("Ray with a token"), id="token"),
        pytest.param(None, marks=unless_drawn("Ray without"), id="open"),
    ],
    indirect=True,
)
def test_submit_follow_and_stop(head: str, request: pytest.FixtureRequest) -> None:
    token = request.node.callspec.params["head"]

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            ray = RayJobs(session, head, token, CALL_SECONDS)
            await answering(ray)
            if token:
                for wrong, code in ((None, 401), ("x" * 32, 403)):
                    with pytest.raises(NoAnswer) as refused:
                        await RayJobs(session, head, wrong, CALL_SECONDS).get("nobody")
                    assert refused.value.code == code
            # Ray writes its own first line of the log without a flush: a quick program's output would come before it.
            script = 'sleep 2; for i in $(seq 200); do echo "line $i $WORD"; done; printf "no newline äö"; exit 3'
            body = {
                "entrypoint": script,
                "submission_id": "rljob-u-0",
                "runtime_env": {"env_vars": {"WORD": "hello"}},
                "metadata": {"rljob": "n/a"},
                "entrypoint_num_cpus": 0,
            }
            await ray.submit(body)
            await ray.submit(body)
            await ray.submit({**body, "submission_id": "rljob-u-1", "entrypoint": "exec sleep 300"})
            failed = await settled(ray, "rljob-u-0", SubmissionState.FAILED)
            assert failed.exit_code == 3
            assert failed.start_time is not None
            assert failed.end_time is not None
            assert failed.end_time >= failed.start_time
            assert len(failed.last_log_lines) == 50
            assert failed.last_log_lines[-2:] == ("line 200 hello", "no newline äö")
            assert failed.session.startswith("session_")
            await settled(ray, "rljob-u-1", SubmissionState.RUNNING)
            await ray.stop("rljob-u-1")
            await settled(ray, "rljob-u-1", SubmissionState.STOPPED)
            await ray.stop("rljob-u-1")
            await ray.stop("nobody")

    asyncio.run(run())
