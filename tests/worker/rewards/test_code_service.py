"""The reward `code` on servers of SandboxFusion's interface: verdicts, and servers that fail, which score nobody 0."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from code_cases import CHEATS, MAIN, PRINTS_RIGHT, RIGHT, TESTS, fenced, right_calls, right_stdin
from reward_cases import make_spec, soon
from support.run_code_server import RunCodeServer, answered, running
from support.samples import drawn
from transformers import PreTrainedTokenizerBase

from rljob_api.spec import SandboxSpec
from rljob_worker.errors import AwayError, UserError
from rljob_worker.rewards.code_service import ServiceCodeReward
from rljob_worker.rewards.runner import RewardRunner
from rljob_worker.rewards.score_calls import RewardError, RewardSample
from rljob_worker.rewards.scorers import Scorers
from rljob_worker.sandbox import service
from rljob_worker.sandbox.limits import SandboxError, SandboxSetup, ServiceSetup
from rljob_worker.sandbox.service import Clock, Ran, Service
from rljob_worker.types import Generation, Prompt, RewardResult

FINISHED = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "", "stderr": ""}
CHECKED = 2
"""Requests of the trial at the start."""


def score(
    tokenizer: PreTrainedTokenizerBase,
    urls: list[str],
    pairs: list[tuple[str, Any]],
    wait: float = 300,
    seconds: float = 60,
    on_error: str = "Fail",
    **args: Any,
) -> list[RewardResult]:
    """Scores (response, tests) pairs by one runner."""
    reward = {"name": "code", "args": {"tests": "tests"} | args, "timeoutSeconds": 600, "onError": on_error}
    servers = {"urls": urls, "waitSeconds": wait, "concurrency": 4}
    sandbox = SandboxSpec.model_validate({"isolation": "Service", "seconds": seconds, "service": servers})
    spec = make_spec(reward).model_copy(update={"sandbox": sandbox})
    assert spec.reward is not None
    empty = Generation(np.zeros(0, np.int64), np.zeros(0, np.float32), "stop")
    samples = []
    for index, (response, tests) in enumerate(pairs):
        prompt = Prompt("data/0", "data", "question", (2,), None, spec.reward, row={"tests": tests})
        samples.append(RewardSample(prompt, index, empty, response))
    with RewardRunner(Scorers(spec, tokenizer)) as runner:
        return runner.score(samples, soon(500))


@pytest.mark.parametrize("kind", drawn("cheats of a service", ["Stdin", "Calls"]))
def test_cheats_score_nothing_beside_right_programs(tokenizer: PreTrainedTokenizerBase, kind: str) -> None:
    main = MAIN if kind == "Stdin" else ""
    names = ["sys.exit", "os._exit", "exit in a call", "prints the verdict", "equal to all", "number equal to all"]
    # Not the one that reads tests: this server has no walls, and other tests of the machine write some to /tmp.
    names += ["patched builtins", "looks into its own memory", "forges its channel"]
    cheats = {name: CHEATS[name] + main for name in names if kind != "Stdin" or name not in PRINTS_RIGHT}
    forged = "import sys\ndef square(n):\n    for frame in sys._current_frames().values():\n"
    forged += "        while frame:\n            task = frame.f_locals.get('task')\n"
    forged += "            if task: print(task['nonce'], '{\"value\": true}', file=sys.__stderr__)\n"
    forged += "            frame = frame.f_back\n    return 'passed'\n"
    cheats["forges with the nonce"] = forged + main
    pairs = [(text, TESTS[kind]) for cheat in cheats.values() for text in (fenced(cheat), fenced(RIGHT + main))]
    with running() as server:
        results = score(tokenizer, [server.url], pairs, kind=kind)
        # Nothing that is expected is sent.
        assert not any(str(1234 * 1234) in json.dumps(body) for body in server.asked)
    assert [name for name, result in zip(cheats, results[::2]) if result.score != 0] == []
    assert [(name, result) for name, result in zip(cheats, results[1::2]) if result.score != 1] == []
    assert [result.error for result in results if result.error] == []


@pytest.mark.parametrize("kind", drawn("right programs of a service", ["Calls", "Stdin"]))
def test_right_programs_score_one_on_several_servers(tokenizer: PreTrainedTokenizerBase, kind: str) -> None:
    count, make = 8, {"Calls": right_calls, "Stdin": right_stdin}[kind]
    random_ = random.Random(count)
    pairs = [make(number, random_) for number in range(count)]
    with running() as one, running() as other:
        results = score(tokenizer, [one.url, other.url], [(fenced(p), tests) for p, tests in pairs], kind=kind)
        assert one.asked
        assert other.asked
    assert [result for result in results if result.score != 1] == []


def test_what_a_program_does_is_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    much = "def square(n):\n    import os\n    for _ in range(600): os.write(1, b'x' * 4096)\n    os._exit(0)\n"
    programs = {"wrong": "def square(n): return 1\n", "raised": "def square(n): raise ValueError\n", "over_limit": much}
    loops = "def square(n):\n    while True: pass\n"
    with running() as server:
        pairs = [(fenced(program + MAIN), TESTS["Stdin"]) for program in programs.values()]
        results = score(tokenizer, [server.url], pairs, kind="Stdin")
        results += score(tokenizer, [server.url], [(fenced(loops), TESTS["Calls"])], kind="Calls", seconds=2)
    names = [*programs, "timed_out"]
    assert [(name, r.score, r.parts[name]) for name, r in zip(names, results)] == [(name, 0, 1) for name in names]


NO_RESULTS: list[object] = [
    [],
    {"run_result": FINISHED},
    answered("SandboxError", None, "no pod"),
    answered("Success", None),
    answered("Success", {"status": "Finished"}),
    answered("Failed", FINISHED | {"status": "Error"}),
    answered("Success", FINISHED | {"stdout": 3}),
    answered("Success", FINISHED | {"return_code": None}),
]


@pytest.mark.parametrize("answer", NO_RESULTS)
def test_what_is_no_result_is_none(answer: object) -> None:
    with pytest.raises(service._Transient, match="without the result of a run"):
        service._ran(json.dumps(answer).encode(), "said")


def passing(body: dict[str, Any], number: int) -> web.Response | float | None:
    """Failures that pass, each once; then it works."""
    failures = [
        web.Response(status=500, text="oh"), web.Response(status=429, headers={"Retry-After": "0"}),
        web.Response(text="<html>"), web.json_response(answered("SandboxError", None, "no pod")),
    ]  # fmt: skip
    return failures[number - CHECKED - 1] if CHECKED < number <= CHECKED + len(failures) else None


def test_failures_that_pass_are_followed_by_another_request(tokenizer: PreTrainedTokenizerBase) -> None:
    with running(passing) as server:
        results = score(tokenizer, [server.url], [(fenced(RIGHT), TESTS["Calls"])], kind="Calls")
        assert len(server.asked) >= CHECKED + 4 + 1
    assert [result.score for result in results] == [1]


def trial(body: dict[str, Any]) -> web.Response:
    """The trial's programs, answered without a process."""
    printed = "42\n"
    if body["stdin"] != "41":
        nonce = json.loads(body["stdin"])["nonce"]
        printed = f'{nonce} {{"names": {{}}}}\n{nonce} {{"value": [42, [41]]}}\n'
    return web.json_response(answered("Success", FINISHED | {"stdout": printed}))


FAILURES: dict[str, int | str | float] = {"status": 500, "page": "<html>", "silence": 600.0}


@pytest.mark.parametrize("name", drawn("a server that goes on to fail", list(FAILURES)))
def test_a_server_that_goes_on_to_fail_fails_the_step_and_scores_nobody(
    tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    failure = FAILURES[name]

    def answer(body: dict[str, Any], number: int) -> web.Response | float | None:
        if number <= CHECKED:
            return trial(body)
        if isinstance(failure, float):
            return failure
        return web.Response(status=failure) if isinstance(failure, int) else web.Response(text=failure)

    pairs = [(fenced(RIGHT), TESTS["Calls"])]
    said = r"no answer to \d+ requests? .*sandbox\.service\.waitSeconds: 1\)"
    with running(answer) as server, pytest.raises(RewardError, match=said) as raised:
        score(tokenizer, [server.url], pairs, wait=1, seconds=0.2, on_error="Score", kind="Calls")
    # It is no fault of the sample.
    assert "onError" not in str(raised.value)


CRASHES = "crash()"


class Crashing:
    """A server of which each `crash()` makes an end; what comes then fails, `away` times."""

    def __init__(self, away: int = 0, failure: Callable[[], web.Response] = lambda: web.Response(status=502)) -> None:
        self._away, self._failure = away, failure
        self.crashed = self._left = 0

    def __call__(self, body: dict[str, Any], number: int) -> web.Response:
        if body["code"] == CRASHES:
            self.crashed += 1
            self._left = self._away
            return self._failure()
        if self._left:
            self._left -= 1
            return web.Response(status=503)
        return web.json_response(answered("Success", FINISHED | {"stdout": "42\n"}))


def run(server: RunCodeServer, *sources: str, wait: float = 300.0) -> list[Ran | BaseException]:
    """Ends of programs that one service runs side by side."""

    async def all_of() -> list[Ran | BaseException]:
        asked = Service(ServiceSetup((server.url,), 8, wait, 5.0))
        try:
            runs = [asked.run(source, "", 5.0, 1000, Clock(5.0, wait)) for source in sources]
            return await asyncio.gather(*runs, return_exceptions=True)
        finally:
            await asked.close()

    return asyncio.run(all_of())


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(service, "_LONGEST_PAUSE", 0.01)


@pytest.mark.parametrize(
    "server",
    [
        Crashing(),
        Crashing(away=3),
        Crashing(failure=lambda: web.json_response(answered("SandboxError", FINISHED | {"status": "Error"}))),
    ],
)
def test_a_program_that_ends_servers_is_lost_and_no_other(hurried: None, server: Crashing) -> None:
    with running(server) as one:
        lost, *others = run(one, CRASHES, *["print(42)"] * 7)
    assert lost == service._LOST
    assert [ran.printed for ran in others if isinstance(ran, Ran)] == ["42\n"] * 7
    # Once, and after each of five programs that ran.
    assert server.crashed == 6


def test_an_outage_blames_no_program(hurried: None) -> None:
    for failure in (lambda *_: web.Response(status=500), lambda *_: web.Response(text="<html>")):
        with running(failure) as server:
            (error,) = run(server, "print(42)", wait=0.3)
        assert isinstance(error, SandboxError)

    def overloaded(body: dict[str, Any], number: int) -> web.Response:
        if body["code"] == service._KNOWN:
            return web.json_response(answered("Success", FINISHED | {"stdout": "42\n"}))
        return web.Response(status=429 if number % 2 else 503, headers={"Retry-After": "0"})

    with running(overloaded) as server:
        (error,) = run(server, "print(42)", wait=0.5)
    assert isinstance(error, SandboxError)


def test_a_proxy_that_is_none_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://user:secret@127.0.0.1:x")
    with running() as server:
        (error,) = run(server, "print(42)")
    assert isinstance(error, SandboxError)
    assert "cannot be asked: Invalid URL" in str(error)
    assert "secret" not in str(error)


@pytest.mark.parametrize("away_from", [1e9, 40.0])
def test_a_program_that_makes_servers_silent_is_lost(monkeypatch: pytest.MonkeyPatch, away_from: float) -> None:
    """By a clock of its own: each request that is not answered takes 15 s. A server that is away in the end is away."""
    passed = 0.0

    async def request(self: Service, url: str, body: dict[str, Any], output_bytes: int) -> Ran:
        nonlocal passed
        if body["code"] == service._KNOWN and passed < away_from:
            return Ran(True, 0, "42\n", 0.1)
        passed += 15
        raise TimeoutError

    monkeypatch.setattr(Service, "_request", request)
    monkeypatch.setattr(service, "time", SimpleNamespace(monotonic=lambda: passed))
    monkeypatch.setattr(service, "_FIRST_PAUSE", 0.0)
    setup = ServiceSetup(("http://a", "http://b"), 8, 60.0, 5.0)
    run_once = Service(setup).run(CRASHES, "", 5.0, 1000, Clock(5.0, 60.0))
    if away_from < 60:
        with pytest.raises(SandboxError, match="no answer to 3 requests in 60 s"):
            asyncio.run(run_once)
    else:
        assert asyncio.run(run_once) == service._LOST


def test_a_response_whose_program_ends_servers_scores_0_with_a_count_of_its_own(hurried: None) -> None:
    def answer(body: dict[str, Any], number: int) -> web.Response | None:
        if body["code"] == service._KNOWN:
            return web.json_response(answered("Success", FINISHED | {"stdout": "42\n"}))
        return web.Response(status=502)

    async def scored(url: str) -> tuple[float, dict[str, float]]:
        setup = SandboxSetup(0, 5.0, service=ServiceSetup((url,), 4, 300.0, 300.0))
        reward = ServiceCodeReward({"kind": "Calls", "tests": "tests", "score": "Share"}, setup)
        try:
            return await reward(fenced(RIGHT), {"tests": TESTS["Calls"]})
        finally:
            await reward._service.close()

    with running(answer) as server:
        value, parts = asyncio.run(scored(server.url))
        # The first test was the last one.
        assert len([body for body in server.asked if body["code"] != service._KNOWN]) == 6
    assert (value, parts["no_result"], parts["raised"], parts["passed"]) == (0, 1, 0, 0)


def test_much_that_is_no_result_is_none_of_the_programs(hurried: None) -> None:
    """A page without end fails the step; a result without end fails the program."""
    much = service._BESIDE_OUTPUT + 10_000
    with running(lambda *_: web.Response(text="<html>" + much * "x")) as server:
        (error,) = run(server, "print(42)", wait=0.3)
    assert isinstance(error, SandboxError)
    printed = '"run_result": {' + much * "x"
    with running(lambda *_: web.json_response(answered("Success", FINISHED | {"stdout": printed}))) as server:
        assert run(server, "print(42)") == [Ran(True, 0, "", 0.0, over_output=True)]
    with running(lambda *_: web.json_response({"said": printed})) as server:
        (error,) = run(server, "print(42)", wait=0.3)
    assert isinstance(error, SandboxError)


def test_a_server_that_is_no_such_one_is_named_before_the_start(tokenizer: PreTrainedTokenizerBase) -> None:
    pairs = [(fenced(RIGHT), TESTS["Calls"])]
    with running() as server, pytest.raises(AwayError, match=r"service: .*/elsewhere/run_code gave HTTP 404"):
        score(tokenizer, [f"{server.url}/elsewhere"], pairs, kind="Calls")
    moved = {"Location": "http://127.0.0.1:1/"}
    with (
        running(lambda body, number: web.Response(status=307, headers=moved)) as server,
        pytest.raises(AwayError, match="gave HTTP 307"),
    ):
        score(tokenizer, [server.url], pairs, kind="Calls")
    with (
        running(lambda body, number: web.json_response(answered("Success", FINISHED))) as server,
        pytest.raises(UserError, match="a program that adds 1"),
    ):
        score(tokenizer, [server.url], pairs, kind="Calls")


def test_one_server_of_two_that_is_away_stops_nothing(tokenizer: PreTrainedTokenizerBase) -> None:
    with running() as gone:
        url = gone.url
    with running() as server:
        results = score(tokenizer, [url, server.url], [(fenced(RIGHT), TESTS["Calls"])] * 3, kind="Calls")
        assert isinstance(server, RunCodeServer)
    assert [result.score for result in results] == [1, 1, 1]
