"""Reach of a stranger on the same machine or network into a run: the sockets of its processes, and attacks on them.

When such a run's driver is killed, nothing is left of it.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any

import jobs
import psutil
import pytest
from support.samples import unless_drawn
from support.slow_reward import write_slow_reward

pytestmark = pytest.mark.slow
ATTACK = Path(__file__).with_name("stranger.py")
GIVE_UP = {"RAY_gcs_rpc_server_connect_timeout_s": "5", "RAY_gcs_rpc_server_reconnect_timeout_s": "10"}
"""Seconds until Ray believes that a port which answers nothing is no head's; 60 and more by its defaults."""
TWO_TRAINERS: dict[str, Any] = {
    "rollout": {
        "promptsPerStep": 4, "samplesPerPrompt": 4, "maxResponseTokens": 4, "ignoreEos": True, "tensorParallel": 2,
    },
    "training": {"precision": "fp32", "tensorParallel": 2, "globalBatchSize": 16, "optimizer": {"lr": 1.0e-3}},
}  # fmt: skip


class Run:
    """A job that trains, until it is stopped."""

    def __init__(self, folder: Path, **spec: Any) -> None:
        self.output, self.spec = folder / "run", spec
        self._mark = uuid.uuid4().hex
        # It leaves the processors to what is tried on it.
        write_slow_reward(folder, 1.0)
        slow = {"reward": {"python": "pace:score"}, "environment": {"pythonPath": [str(folder)]}}
        job = jobs.manifest(folder, steps=100000, checkpoint={"everySteps": 100000}, **slow, **spec)
        mark = {"RLJOB_TEST_MARK": self._mark}
        # What a process was started with is not what a fork of it was given.
        self.process = jobs.start("run", job, "--output", self.output, environment=mark, cold=True)
        jobs.wait_for(lambda: self._step() >= 2 or self.process.poll() is not None, "two steps")
        assert self.process.poll() is None, jobs.finish(self.process)

    def _step(self) -> int:
        log = self.output / "steps.jsonl"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def processes(self) -> list[psutil.Process]:
        """All of the run's: they inherit its mark, or one of their parents did."""
        family = {self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children(recursive=True))}
        for process in psutil.process_iter():
            try:
                marked = process.environ().get("RLJOB_TEST_MARK") == self._mark
            except psutil.Error:
                continue
            if marked:
                family.add(process.pid)
                with suppress(psutil.NoSuchProcess):
                    family |= {child.pid for child in process.children(recursive=True)}
        found = []
        for pid in family:
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def listening(self) -> list[tuple[str, int, str]]:
        """Address, port and process of every TCP socket that listens and every UDP socket that has no peer."""
        found = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                for socket in process.net_connections(kind="inet"):
                    without_peer = socket.status == psutil.CONN_NONE and not socket.raddr
                    if socket.laddr and (socket.status == psutil.CONN_LISTEN or without_peer):
                        found.append((socket.laddr.ip, socket.laddr.port, process.name()))
        return found

    def tells_the_token_to_nobody(self) -> None:
        """Its owner alone reads the file that has the token, and nothing else has it: variables, logs, records."""
        (file,) = Path(tempfile.gettempdir()).glob(f"rljob-ray-{self.process.pid}-*/token")
        assert [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent)] == [0o600, 0o700]
        token = file.read_text()
        assert len(token) >= 32
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                # A command line can be read by all users: not even the file is named there.
                assert not [argument for argument in process.cmdline() if "token" in argument.lower()], process
                assert token not in " ".join(process.environ().values()), process
        written = [path for folder in (file.parent, self.output) for path in folder.rglob("*") if path.is_file()]
        assert any(path.suffix in (".log", ".err", ".out") for path in written)
        assert [path for path in written if _holds(path, token.encode())] == [file]

    def goes_on(self) -> None:
        """It trains as before."""
        step = self._step()
        jobs.wait_for(lambda: self._step() >= step + 3 or self.process.poll() is not None, "three more steps")
        assert self.process.poll() is None, jobs.finish(self.process)
        assert not [event for event in jobs.events(self.output) if event["event"] == "failed"]

    def leaves_nothing(self, trainers: int) -> None:
        """The driver is killed; its processes and the memory that they share end after it."""
        children = [one.pid for one in self.processes() if one.pid != self.process.pid]
        assert len(children) >= 4, "Ray, trainers and engine should be running"
        slots = [slot for child in children for slot in Path("/dev/shm").glob(f"rljob-*-*-{child}-*-*")]
        assert len(slots) == 2, "those of the trainer that sends"
        self.process.kill()
        jobs.finish(self.process)
        try:
            jobs.wait_for(lambda: not any(map(jobs.alive, children)), f"end of {children}", 60)
        except AssertionError:
            # What it is, and what it waits for, is gone when the test is over.
            left = {child: Path(f"/proc/{child}/status").read_text() for child in children if jobs.alive(child)}
            raise AssertionError(f"they survived: {left}") from None
        jobs.wait_for(lambda: not any(slot.exists() for slot in slots), f"end of {slots}", 60)
        logs = ["engine-0.log", *(f"trainer-{rank}.log" for rank in range(trainers))]
        assert sorted(path.name for path in (self.output / "logs").glob("*.log")) == logs


TRAINERS = [
    pytest.param({}, marks=unless_drawn("strangers beside one trainer"), id="one-trainer"),
    pytest.param(TWO_TRAINERS, marks=unless_drawn("strangers beside two trainers"), id="two-trainers"),
]


@pytest.fixture(params=TRAINERS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    running = Run(tmp_path, **request.param)
    yield running
    if running.process.poll() is None:
        os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait()


def test_a_stranger_reaches_nothing(run: Run, tmp_path: Path) -> None:
    listening = run.listening()
    assert any(name in ("gcs_server", "raylet") for _, _, name in listening), listening
    assert [entry for entry in listening if not _is_loopback(entry[0])] == []
    run.tells_the_token_to_nobody()
    if os.getuid() == 0:
        ports = sorted({port for _, port, _ in listening})
        seen = attack(ports, tmp_path)
        assert not (tmp_path / "open" / "job").exists(), seen
        assert seen == {"posted": [], "set": [], "kept": [], "joined": []}
    # What they were refused with is in the logs now.
    run.tells_the_token_to_nobody()
    run.goes_on()
    run.leaves_nothing(trainers=2 if run.spec else 1)


def attack(ports: list[int], tmp_path: Path) -> dict[str, Any]:
    """Try everything on these ports as another user."""
    # pytest's folders are closed to others.
    (tmp_path / "open").mkdir(mode=0o777)
    os.chmod(tmp_path / "open", 0o777)
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **GIVE_UP}
    done = subprocess.run(
        [sys.executable, "-I", str(ATTACK), str(tmp_path / "open" / "job"), *map(str, ports)],
        cwd="/", env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _holds(path: Path, content: bytes) -> bool:
    try:
        return content in path.read_bytes()
    except FileNotFoundError:  # one that took another's name meanwhile
        return False


def _is_loopback(text: str) -> bool:
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback
