"""Environments of a server that speaks OpenEnv's protocol, in confined processes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from environment_hosts import MakeHosts
from support.samples import unless_drawn

from rljob_api.spec import OpenEnvSpec
from rljob_worker.environments.base import Answer, Began, EnvironmentFailure, FailureKind, GoneError, Stepped
from rljob_worker.environments.check import NO_ACTION, check_environment
from rljob_worker.environments.hosts import EnvironmentHosts
from rljob_worker.environments.load import Source
from rljob_worker.environments.openenv import OpenEnv, OpenEnvServer
from rljob_worker.errors import AwayError, UserError

SERVER = Path(__file__).with_name("openenv_server.py")
_SECONDS = 120.0


def started(most: int = 64) -> tuple[subprocess.Popen[str], str]:
    """A server, and its address."""
    server = subprocess.Popen([sys.executable, str(SERVER), str(most)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, f"http://127.0.0.1:{int(server.stdout.readline())}/env"


@contextmanager
def serving(most: int = 64) -> Iterator[str]:
    server, url = started(most)
    try:
        yield url
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as found:
        yield found


@pytest.fixture
def environment(url: str) -> Iterator[OpenEnv]:
    """A session that has begun, without a process of its own."""
    with serves(url) as server:
        made = server()
        made.reset(seed=3, options={})
        yield made
        made.close()


def serves(url: str, **more: Any) -> closing[OpenEnvServer]:
    return closing(OpenEnvServer(OpenEnvSpec.model_validate(settings_of(url, **more))))


def settings_of(url: str, **more: Any) -> dict[str, Any]:
    return {"url": url, "action": "message", "observation": "text", "waitSeconds": 0} | more


def source_of(url: str, **more: Any) -> Source:
    return Source(openenv=settings_of(url, **more))


def asked(url: str, path: str) -> Any:
    with urllib.request.urlopen(url.replace("/env", path), timeout=_SECONDS) as answer:
        return json.load(answer)


def wait_for_sessions(url: str, count: int) -> None:
    deadline = time.monotonic() + _SECONDS
    while (found := asked(url, "/sessions")) != count:
        assert time.monotonic() < deadline, f"{found} sessions are open"
        time.sleep(0.02)


def taken(hosts: EnvironmentHosts) -> Answer:
    while not (found := hosts.take(1.0)):
        assert hosts.outstanding
    return found[0][1]


def begun(hosts: EnvironmentHosts, key: int, seed: int) -> Answer:
    hosts.begin(key, seed)
    return taken(hosts)


def stepped(hosts: EnvironmentHosts, key: int, action: str) -> Answer:
    hosts.step(key, action)
    return taken(hosts)


def played(environment: OpenEnv) -> None:
    environment.reset(seed=3, options={})
    environment.step("left")


def failed(answer: Answer, kind: FailureKind) -> str:
    assert isinstance(answer, EnvironmentFailure), answer
    assert answer.kind is kind
    return answer.text


def test_an_episode_is_a_session_until_its_end(url: str, make_hosts: MakeHosts) -> None:
    hosts = make_hosts(source_of(url))
    for key, seed in ((0, 7), (1, 8)):
        assert begun(hosts, key, seed) == Began(f"seed {seed}")
    assert asked(url, "/sessions") == 2
    # A policy generates meanwhile.
    assert asked(url, "/ping") == "pong"
    assert stepped(hosts, 0, "left") == Stepped("left 1", 0.5, False, False)
    assert stepped(hosts, 1, "left") == Stepped("left 1", 0.5, False, False)
    assert "no such move" in failed(stepped(hosts, 1, "raise"), FailureKind.DATA)
    wait_for_sessions(url, 1)
    assert begun(hosts, 1, 9) == Began("seed 9")
    assert stepped(hosts, 0, "end") == Stepped("end 2", 1.0, True, False)
    hosts.end(0)
    hosts.send()
    wait_for_sessions(url, 1)
    hosts.close()
    wait_for_sessions(url, 0)


def test_without_a_field_all_of_an_observation_is_shown(url: str) -> None:
    with serves(url, observation=None) as server:
        environment = server()
        assert environment.reset(seed=3, options={}) == ('{"text": "seed 3", "legal": [1, 2]}', {})
        environment.close()


def test_an_action_that_is_none_is_the_policys_failure(environment: OpenEnv) -> None:
    assert environment.step(" left ") == ("No valid action: no blank ends", 0.0, False, False, {"valid": 0.0})
    assert environment.step("left") == ("left 1", 0.5, False, False, {})


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("raise", "the server answered EXECUTION_ERROR: no such move"),
        ("list", "the server answered with '[]', which is no JSON object"),
        ("bytes", "no message of OpenEnv: TypeError: bytes"),
        ("long", "no message of OpenEnv: WebSocketError"),
    ],
)
def test_an_answer_that_is_none_is_an_error(environment: OpenEnv, action: str, said: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=re.escape(said)):
        environment.step(action)


def test_an_answer_is_not_taken_for_that_to_the_next_action(url: str, environment: OpenEnv) -> None:
    assert environment.step("twice") == ("twice 1", 0.5, False, False, {})
    # By then its second answer has come.
    assert asked(url, "/ping") == "pong"
    with pytest.raises(ValueError, match=r"the server sent a message that it was not asked for: .*twice 1"):
        environment.step("left")


def test_a_session_that_ends_is_gone(environment: OpenEnv) -> None:
    with pytest.raises(GoneError, match="the server ended the session"):
        environment.step("leave")


@pytest.mark.parametrize(
    ("seed", "error", "said"),
    [(13, GoneError, "FACTORY_ERROR: no machine"), (14, ValueError, "an episode that is done")],
)
def test_an_episode_that_does_not_begin_is_an_error(url: str, seed: int, error: type[Exception], said: str) -> None:
    with serves(url) as server, pytest.raises(error, match=said):
        server().reset(seed=seed, options={})


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (None, r"ws://127.0.0.1:9/ws: ClientConnectorError.*waitSeconds, 0 s"),
        ("/sessions", r"no WebSocket of OpenEnv: HTTP 404"),
        ("/away", r"the server redirects to /env/ws, and only the address that is given is asked"),
    ],
)
def test_a_server_of_another_kind_is_gone(url: str, path: str | None, said: str) -> None:
    address = "http://127.0.0.1:9" if path is None else url.replace("/env", path)
    with serves(address) as server, pytest.raises(GoneError, match=said):
        server().reset(seed=3, options={})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"observation": "board"}, r"the observation has no field 'board' \(environment.openenv.observation\)"),
        ({"action": "move"}, r"not objects with 'move' alone \(environment.openenv.action\)"),
    ],
)
def test_a_field_that_is_not_there_is_an_error(url: str, settings: dict[str, str], said: str) -> None:
    with serves(url, **settings) as server:
        environment = server()
        with pytest.raises(ValueError, match=said):
            played(environment)
        environment.close()


def test_a_server_is_tried_before_a_run(url: str, make_hosts: MakeHosts) -> None:
    with pytest.raises(UserError, match=r"step 1: .*environment.openenv.action") as refused:
        check_environment(lambda: make_hosts(source_of(url, action="move"), retries=0))
    assert refused.type is UserError
    with pytest.raises(AwayError, match="ClientConnectorError"):
        check_environment(lambda: make_hosts(source_of("http://127.0.0.1:9", waitSeconds=0), retries=0))
    checked = check_environment(lambda: make_hosts(source_of(url), retries=0))
    assert checked.repeats
    assert checked.answers[:2] == (Began("seed 3"), Stepped(f"{NO_ACTION} 1", 0.5, False, False))


@unless_drawn("a server of environments that dies or hangs")
def test_a_server_that_dies_is_infra_and_one_that_hangs_too(make_hosts: MakeHosts) -> None:
    with serving() as url:
        hosts = make_hosts(source_of(url), deterministic=False, retries=0, step=2.0)
        begun(hosts, 0, 3)
        text = failed(stepped(hosts, 0, "hang"), FailureKind.INFRA)
        assert "step gave no answer within environment.stepSeconds (2 s)" in text
        wait_for_sessions(url, 0)
        begun(hosts, 1, 4)
        assert "the server ended the session" in failed(stepped(hosts, 1, "die"), FailureKind.INFRA)
        assert "ClientConnectorError" in failed(begun(hosts, 2, 5), FailureKind.INFRA)


@unless_drawn("a session of environments that is lost")
def test_a_session_that_was_lost_is_made_anew_where_it_is_deterministic(url: str, make_hosts: MakeHosts) -> None:
    hosts = make_hosts(source_of(url), retries=1)
    begun(hosts, 0, 3)
    stepped(hosts, 0, "left")
    assert stepped(hosts, 0, "leave-once") == Stepped("leave-once 2", 1.0, False, False)
    assert (hosts.counts.restarts, hosts.counts.replayed) == (1, 2)


@unless_drawn("a full server of environments")
def test_a_full_server_is_waited_for(make_hosts: MakeHosts) -> None:
    with serving(most=1) as url:
        first = make_hosts(source_of(url), retries=0)
        second = make_hosts(source_of(url, waitSeconds=300), retries=0, reset=600)
        begun(first, 0, 3)
        with serves(url) as server, pytest.raises(GoneError, match="CAPACITY_REACHED: full"):
            server().reset(seed=4, options={})
        second.begin(0, 5)
        assert second.take(1.0) == []
        first.end(0)
        first.send()
        assert taken(second) == Began("seed 5")


@unless_drawn("sessions of environments whose driver is killed")
def test_no_session_outlives_a_driver_that_was_killed(url: str, tmp_path: Path) -> None:
    wait_for_sessions(url, 0)
    program = f"""
import sys, time
sys.path[:0] = {sys.path!r}
from pathlib import Path
from environment_hosts import place_of
from test_openenv import source_of
from rljob_worker.environments.hosts import EnvironmentHosts
source = source_of({url!r})
hosts = EnvironmentHosts(source, place_of(source, Path({str(tmp_path)!r})), processes=2)
for key in range(8):
    hosts.begin(key, key)
while hosts.outstanding:
    hosts.take(1.0)
print("ready", flush=True)
time.sleep(600)
"""
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "ready\n"
    assert asked(url, "/sessions") == 8
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    wait_for_sessions(url, 0)
