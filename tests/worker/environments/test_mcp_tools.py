"""Tools of a real MCP server, which is started in an environment's confined process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from environment_hosts import place_of
from support.samples import unless_all
from test_tools import IMPORT_SECONDS, byte_tokenizer, call

from rljob_worker.environments.base import Answer, EnvironmentFailure, FailureKind, Stepped
from rljob_worker.environments.host_process import Deadlines
from rljob_worker.environments.hosts import EnvironmentHosts
from rljob_worker.environments.load import Source
from rljob_worker.environments.tools import ToolSource
from rljob_worker.errors import UserError

SERVER = Path(__file__).with_name("mcp_server.py")
_SECONDS = 30.0


def source_of(*command: str, parser: str | None = None, tokenizer: Path | None = None) -> Source:
    return Source(tools=ToolSource((command,), parser, None if tokenizer is None else str(tokenizer)))


def hosts_of(source: Source, folder: Path, **more: Any) -> EnvironmentHosts:
    deadlines = Deadlines(60.0, more.pop("step", 60.0), IMPORT_SECONDS)
    settings = {"processes": 1, "deterministic": False, "retries": 0, **more}
    return EnvironmentHosts(source, place_of(source, folder), deadlines=deadlines, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mcp")


@pytest.fixture(scope="module")
def hosts(folder: Path) -> Iterator[EnvironmentHosts]:
    os.environ["RLJOB_TEST_SECRET"] = "s3cret"
    tokenizer = byte_tokenizer(folder / "tokenizer")
    # By the name of this interpreter, whichever one has it outside.
    source = source_of("python", str(SERVER), str(folder), parser="hermes", tokenizer=tokenizer)
    with hosts_of(source, folder) as made:
        made.start()
        yield made
    del os.environ["RLJOB_TEST_SECRET"]
    gone(folder)


def pids(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def gone(folder: Path) -> None:
    """Wait until no server of this folder runs any more."""
    deadline = time.monotonic() + _SECONDS
    while any(psutil.pid_exists(pid) for pid in pids(folder)):
        assert time.monotonic() < deadline, "a server still runs"
        time.sleep(0.05)


_KEYS = iter(range(10**6))


def taken(hosts: EnvironmentHosts) -> Answer:
    while not (found := hosts.take(1.0)):
        pass
    return found[0][1]


def begun(hosts: EnvironmentHosts) -> int:
    key = next(_KEYS)
    hosts.begin(key, 0, {})
    taken(hosts)
    return key


def said(hosts: EnvironmentHosts, action: str) -> Stepped:
    key = begun(hosts)
    hosts.step(key, action)
    found = taken(hosts)
    assert isinstance(found, Stepped), found
    hosts.end(key)
    return found


def test_its_tools_have_its_schemas_and_answer_calls(hosts: EnvironmentHosts) -> None:
    functions = {schema["function"]["name"]: schema["function"] for schema in hosts.schemas}
    assert functions["open_box"]["description"] == "Open a box."
    assert functions["open_box"]["parameters"]["properties"]["box"]["enum"] == ["a", "b"]
    found = said(hosts, call("open_box", box="a") + call("open_box", box="b"))
    assert (found.parts, found.values["tool_calls"]) == (("3", "7"), 2)


def test_a_tool_that_says_it_failed_is_told_to_the_policy(hosts: EnvironmentHosts) -> None:
    found = said(hosts, call("fails", why="rain"))
    assert found.observation.startswith("error: ")
    assert "because of rain" in found.observation
    assert found.values == {"valid": 1, "tool_calls": 1, "tool_errors": 1}


def test_a_call_that_does_not_fit_never_reaches_the_server(hosts: EnvironmentHosts) -> None:
    found = said(hosts, call("open_box", box="z"))
    assert found.observation.startswith("error: the arguments of open_box do not fit: box: 'z' is not one of")
    assert found.values == {"valid": 0, "tool_calls": 0, "tool_errors": 1}


def test_its_command_is_confined_and_sees_no_variable_of_the_driver(hosts: EnvironmentHosts, folder: Path) -> None:
    names = said(hosts, call("variables")).observation.split()
    assert "PATH" in names
    assert "RLJOB_TEST_SECRET" not in names
    assert not [name for name in names if "TOKEN" in name or name.startswith("RAY_")]
    secret = folder.parent / "elsewhere"
    secret.mkdir(exist_ok=True)
    (secret / "token").write_text("s3cret")
    assert said(hosts, call("reads", path=str(secret / "token"))).observation == "refused: Permission denied"


def test_a_server_that_ends_is_infra(hosts: EnvironmentHosts) -> None:
    assert_server_ends(hosts)


@unless_all("imports vLLM in another process, as each host that is started again")
def test_a_server_that_ended_is_started_again(hosts: EnvironmentHosts, folder: Path) -> None:
    before = set(pids(folder))
    assert_server_ends(hosts)
    assert said(hosts, call("open_box", box="a")).parts == ("3",)
    assert set(pids(folder)) - before, "no other server was started"


def assert_server_ends(hosts: EnvironmentHosts) -> None:
    key = begun(hosts)
    hosts.step(key, call("ends"))
    found = taken(hosts)
    assert isinstance(found, EnvironmentFailure)
    assert found.kind is FailureKind.INFRA
    assert "the MCP server" in found.text


@unless_all("imports vLLM in another process; other environments are ended by the same code")
def test_a_server_that_hangs_is_ended_by_the_deadline(hosts: EnvironmentHosts, tmp_path: Path) -> None:
    tools = hosts._source.tools
    assert tools is not None
    source = source_of(
        sys.executable, str(SERVER), str(tmp_path), parser="hermes", tokenizer=Path(str(tools.tokenizer))
    )
    with hosts_of(source, tmp_path, step=1.0) as made:
        key = begun(made)
        made.step(key, call("hangs"))
        found = taken(made)
        assert isinstance(found, EnvironmentFailure)
        assert (found.kind, "environment.stepSeconds (1 s)" in found.text) == (FailureKind.INFRA, True)
        gone(tmp_path)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["/no/such/program"], "/no/such/program is no MCP server: FileNotFoundError"),
        ([sys.executable, "-c", "print('hello')"], "is no MCP server"),
    ],
)
def test_what_is_no_server_is_refused(tmp_path: Path, command: list[str], said: str) -> None:
    with hosts_of(source_of(*command), tmp_path) as hosts, pytest.raises(UserError) as caught:
        hosts.start()
    assert str(caught.value).startswith("environment.tools[0].mcp: ")
    assert said in str(caught.value)


def test_no_server_outlives_a_driver_that_was_killed(tmp_path: Path) -> None:
    program = f"""
import sys, time
sys.path[:0] = {sys.path!r}
from pathlib import Path
from test_mcp_tools import hosts_of, source_of
hosts = hosts_of(source_of({sys.executable!r}, {str(SERVER)!r}, {str(tmp_path)!r}), Path({str(tmp_path)!r}))
hosts.start()
print("ready", flush=True)
time.sleep(600)
"""
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "ready\n"
    (pid,) = pids(tmp_path)
    assert psutil.pid_exists(pid)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    gone(tmp_path)
    assert json.dumps(pids(tmp_path)) == json.dumps([pid])
