"""The clients of Ray's job API and of the driver, against answers as the two give them."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rljob_api.wire.steps_page import PAGE
from rljob_operator.ray.driver import Driver
from rljob_operator.ray.http import AnswerTooLarge, NoAnswer
from rljob_operator.ray.jobs import RayJobs, last_lines
from rljob_operator.state.observed import SubmissionState

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
INFO: dict[str, Any] = {
    "type": "SUBMISSION",
    "submission_id": "rljob-u-0",
    "status": "RUNNING",
    "message": "Job is currently running.",
    "start_time": 1700000000123,
    "end_time": None,
    "driver_exit_code": None,
    "driver_node_id": "ab",
}
STATUS = {
    "ready": True,
    "step": 3,
    "steps": 10,
    "phase": "rollout",
    "attempt": 0,
    "weight_version": 3,
    "last_checkpoint_step": None,
    "stopping": False,
}


@asynccontextmanager
async def server(answers: dict[str, Any]) -> AsyncIterator[tuple[aiohttp.ClientSession, str, list[web.Request]]]:
    """Answers are JSON, (code, text), or a handler, by path."""
    asked: list[web.Request] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request)
        await request.read()
        answer = answers.get(request.path, (404, "nothing here"))
        if callable(answer):
            return await answer(request)
        if isinstance(answer, tuple):
            return web.Response(status=answer[0], text=answer[1])
        return web.json_response(answer)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:
        yield session, f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    await runner.cleanup()


def jobs(answers: dict[str, Any], call: Callable[[RayJobs], Awaitable[Any]], seconds: float = 2.0) -> Any:
    async def run() -> Any:
        async with server(answers) as (session, address, asked):
            result = await call(RayJobs(session, address, "secret", seconds))
            assert all(request.headers["Authorization"] == "Bearer secret" for request in asked)
            return result

    return asyncio.run(run())


def test_a_submission_that_is_known_already_is_a_success() -> None:
    body = {"submission_id": "rljob-u-0", "entrypoint": "true"}
    known = "...ValueError: Job with submission_id rljob-u-0 already exists. Please use a different submission_id."
    jobs({"/api/jobs/": {"submission_id": "rljob-u-0"}}, lambda ray: ray.submit(body))
    jobs({"/api/jobs/": (500, known)}, lambda ray: ray.submit(body))
    other = "ValueError: Job with submission_id rljob-u-00 already exists."
    for refused in (other, "No available agent to submit job"):
        with pytest.raises(NoAnswer, match="answered 500"):
            jobs({"/api/jobs/": (500, refused)}, lambda ray: ray.submit(body))


def test_a_running_submission() -> None:
    view = jobs({"/api/jobs/rljob-u-0": INFO}, lambda ray: ray.get("rljob-u-0"))
    assert (view.state, view.exit_code, view.start_time) == (SubmissionState.RUNNING, None, 1700000000.123)
    assert view.last_log_lines == ()
    assert view.session == ""


def test_an_ended_submission_has_its_exit_code_and_last_lines() -> None:
    async def tail(request: web.Request) -> web.StreamResponse:
        assert dict(request.query) == {"node_id": "ab", "filename": "job-driver-rljob-u-0.log", "lines": "50"}
        return web.Response(text="one\ntwo")

    ended = {**INFO, "status": "FAILED", "driver_exit_code": 3, "end_time": 1700000001000}
    answers = {
        "/api/jobs/rljob-u-0": ended,
        "/api/v0/logs/file": tail,
        "/api/version": {"session_name": "session_1"},
    }
    view = jobs(answers, lambda ray: ray.get("rljob-u-0"))
    assert (view.state, view.exit_code, view.end_time) == (SubmissionState.FAILED, 3, 1700000001.0)
    assert view.last_log_lines == ("one", "two")
    assert view.session == "session_1"


def test_a_log_that_cannot_be_read_does_not_hide_the_exit_code() -> None:
    answers = {
        "/api/jobs/rljob-u-0": {**INFO, "status": "FAILED", "driver_exit_code": 3},
        "/api/v0/logs/file": (500, "Server got itself in trouble"),
        "/api/version": {"session_name": "session_1"},
    }
    view = jobs(answers, lambda ray: ray.get("rljob-u-0"))
    assert view.exit_code == 3
    assert "could not be read" in view.last_log_lines[0]


def test_only_ray_itself_can_say_that_a_submission_is_missing() -> None:
    version = {"/api/version": {"session_name": "session_2"}}
    missing = {"/api/jobs/rljob-u-0": (404, "Job rljob-u-0 does not exist"), **version}
    view = jobs(missing, lambda ray: ray.get("rljob-u-0"))
    assert (view.state, view.session) == (SubmissionState.MISSING, "session_2")
    for other in ((404, "404: Not Found"), (503, "no endpoints"), (401, "Unauthorized")):
        with pytest.raises(NoAnswer) as raised:
            jobs({"/api/jobs/rljob-u-0": other, **version}, lambda ray: ray.get("rljob-u-0"))
        assert raised.value.code == other[0]


@pytest.mark.parametrize("answer", [{"status": "DANCING"}, [], {}, "text", None])
def test_rubbish_is_no_answer(answer: Any) -> None:
    with pytest.raises(NoAnswer, match=r"no job|no JSON"):
        jobs({"/api/jobs/rljob-u-0": answer}, lambda ray: ray.get("rljob-u-0"))


def test_each_request_has_a_deadline_and_a_largest_answer() -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(5)
        return web.Response()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(b"x" * 2**20)
        return response

    with pytest.raises(NoAnswer, match=r"did not answer within 0\.2 s"):
        jobs({"/api/jobs/rljob-u-0": slow}, lambda ray: ray.get("rljob-u-0"), seconds=0.2)
    with pytest.raises(NoAnswer, match="answered more than 1048576 bytes"):
        jobs({"/api/jobs/rljob-u-0": endless}, lambda ray: ray.get("rljob-u-0"), seconds=20)


def sized(size: int) -> Answer:
    """An answer of so many bytes that takes twenty times as many when it is read as JSON."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text="[" + "[]," * (size // 3) + "[]]")

    return answer


def test_each_endpoint_has_a_largest_answer_of_its_own() -> None:
    ended = {**INFO, "status": "FAILED", "driver_exit_code": 3}
    version = {"/api/version": {"session_name": "session_1"}}
    name = "/api/jobs/rljob-u-0"
    with pytest.raises(AnswerTooLarge, match="more than 65536 bytes to /api/version"):
        jobs({name: ended, "/api/version": sized(70_000)}, lambda ray: ray.get("rljob-u-0"))
    with pytest.raises(AnswerTooLarge, match=f"more than 1048576 bytes to {name}"):
        jobs({name: sized(1_100_000)}, lambda ray: ray.get("rljob-u-0"))
    view = jobs({name: ended, "/api/v0/logs/file": sized(1_100_000), **version}, lambda ray: ray.get("rljob-u-0"))
    assert "more than 1048576 bytes" in view.last_log_lines[0]
    unplaced = {**ended, "driver_node_id": None}
    view = jobs({name: unplaced, f"{name}/logs": sized(1_100_000), **version}, lambda ray: ray.get("rljob-u-0"))
    assert "more than 1048576 bytes" in view.last_log_lines[0]
    with pytest.raises(AnswerTooLarge, match="more than 65536 bytes to /v1/status"):
        driver({"/v1/status": sized(70_000)}, lambda one: one.status())
    with pytest.raises(AnswerTooLarge, match="more than 4194304 bytes to /v1/steps"):
        driver({"/v1/steps": sized(5_000_000)}, lambda one: one.steps(-1))
    with pytest.raises(AnswerTooLarge, match="more than 1000 bytes to /v1/steps"):
        driver({"/v1/steps": sized(5000)}, lambda one: one.steps(-1, 1000))


def test_a_job_with_the_largest_manifest_can_be_read() -> None:
    environment = {"env_vars": {"RLJOB_MANIFEST": "x" * 96 * 1024}}
    info = {**INFO, "runtime_env": environment, "message": "y" * 20_000, "entrypoint": "z" * 1000}
    view = jobs({"/api/jobs/rljob-u-0": info}, lambda ray: ray.get("rljob-u-0"))
    assert view.state is SubmissionState.RUNNING


def test_an_answer_is_not_unpacked() -> None:
    """A few bytes could become gigabytes, before anybody counts them."""
    asked: list[str] = []

    async def packed(request: web.Request) -> web.StreamResponse:
        asked.append(request.headers["Accept-Encoding"])
        return web.Response(body=gzip.compress(json.dumps(STATUS).encode()), headers={"Content-Encoding": "gzip"})

    with pytest.raises(NoAnswer, match="no JSON"):
        driver({"/v1/status": packed}, lambda one: one.status())
    assert asked == ["identity"]


def test_json_that_is_nested_too_deeply_is_no_answer() -> None:
    async def deep(request: web.Request) -> web.StreamResponse:
        return web.Response(text="[" * 30_000)

    with pytest.raises(NoAnswer, match="no JSON"):
        driver({"/v1/status": deep}, lambda one: one.status())


def test_nobody_there() -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(NoAnswer, match=r"cannot be reached at http://127\.0\.0\.1:9"):
                await RayJobs(session, "http://127.0.0.1:9").get("x")
            with pytest.raises(NoAnswer, match="cannot be reached"):
                await RayJobs(session, "http://bad host").get("x")

    asyncio.run(run())


def test_last_lines_are_few_short_and_plain() -> None:
    assert last_lines("") == ()
    assert last_lines("a\n\nb\n") == ("a", "", "b")
    assert last_lines("10%\r50%\r100%\r\n\x1b[31mred\x1b[0m") == ("100%", "red")
    many = last_lines("\n".join(str(n) for n in range(100)) + "\n" + "y" * 9000)
    assert len(many) == 50
    assert many[-1] == "y" * 4096


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("driver_exit_code", "3"),
        ("driver_exit_code", 2.5),
        ("driver_exit_code", math.inf),
        ("driver_exit_code", 2**31),
        ("driver_exit_code", True),
        ("start_time", math.inf),
        ("start_time", math.nan),
        ("start_time", 10**400),
        ("end_time", 10**18),
        ("end_time", -1),
    ],
)
def test_numbers_of_a_job_that_the_status_cannot_hold_are_no_answer(field: str, value: Any) -> None:
    with pytest.raises(NoAnswer, match=f"no job: .*{field} is no whole number"):
        jobs({"/api/jobs/rljob-u-0": {**INFO, field: value}}, lambda ray: ray.get("rljob-u-0"))


@pytest.mark.parametrize("code", [0, 75, 255, -9, None])
def test_exit_codes(code: int | None) -> None:
    view = jobs({"/api/jobs/rljob-u-0": {**INFO, "driver_exit_code": code}}, lambda ray: ray.get("rljob-u-0"))
    assert view.exit_code == code


@pytest.mark.parametrize("name", ["s" * 254, "", 7, None, ["session_1"], "\ud800", "a\nb"])
def test_a_session_that_the_status_cannot_hold_is_no_answer(name: Any) -> None:
    answers = {"/api/jobs/rljob-u-0": (404, "Job rljob-u-0 does not exist"), "/api/version": {"session_name": name}}
    with pytest.raises(NoAnswer, match=r"no version: .*session_name is no name"):
        jobs(answers, lambda ray: ray.get("rljob-u-0"))


def driver(answers: dict[str, Any], call: Callable[[Driver], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with server(answers) as (session, address, _):
            return await call(Driver(session, address, "t", 2.0))

    return asyncio.run(run())


def test_the_drivers_status_and_records() -> None:
    status = driver({"/v1/status": STATUS}, lambda one: one.status())
    assert (status.ready, status.step, status.phase, status.last_checkpoint_step) == (True, 3, "rollout", None)
    page = driver({"/v1/steps": {"steps": [{"index": 4}], "total": 5}}, lambda one: one.steps(3))
    assert (page.records, page.total) == ([{"index": 4}], 5)
    driver({"/v1/checkpoint": {"accepted": True}}, lambda one: one.checkpoint())


@pytest.mark.parametrize("answer", [{}, [], {"steps": [{}], "total": 1}, {"steps": None, "total": 1}, (500, "no")])
def test_a_driver_that_answers_rubbish(answer: Any) -> None:
    with pytest.raises(NoAnswer, match="driver"):
        driver({"/v1/steps": answer}, lambda one: one.steps(-1))
    with pytest.raises(NoAnswer, match="driver"):
        driver({"/v1/status": answer}, lambda one: one.status())


@pytest.mark.parametrize("field", ["step", "attempt", "last_checkpoint_step", "weight_version"])
@pytest.mark.parametrize("value", [math.inf, math.nan, 1e400, 2**31, 10**400, -1, 1.5, "3", True, []])
def test_numbers_of_a_driver_that_the_status_cannot_hold_are_no_answer(field: str, value: Any) -> None:
    with pytest.raises(NoAnswer, match=f"no status: .*{field} must be a whole number from 0 to 2147483647"):
        driver({"/v1/status": {**STATUS, field: value}}, lambda one: one.status())


def test_a_phase_that_is_no_text_is_no_answer() -> None:
    with pytest.raises(NoAnswer, match=r"no status: .*phase must be a text"):
        driver({"/v1/status": {**STATUS, "phase": ["rollout"] * 1000}}, lambda one: one.status())


@pytest.mark.parametrize("total", [math.inf, math.nan, 10**400, -1, "5", None])
def test_a_number_of_records_that_is_none_is_no_answer(total: Any) -> None:
    with pytest.raises(NoAnswer, match=r"no step records: .*total must be a whole number"):
        driver({"/v1/steps": {"steps": [], "total": total}}, lambda one: one.steps(-1))


@pytest.mark.parametrize("steps", [[{"index": 0}] * (PAGE + 1), {}, ""])
def test_more_records_than_a_page_has_are_no_answer(steps: Any) -> None:
    with pytest.raises(NoAnswer, match=r"no step records: .*no list of at most 1000 records"):
        driver({"/v1/steps": {"steps": steps, "total": 5}}, lambda one: one.steps(-1))
