"""Ray's job API on the head of a job's cluster."""

from __future__ import annotations

import re
from dataclasses import replace
from urllib.parse import quote

import aiohttp

from rljob_api.base import INT32_MAX
from rljob_api.json_types import Json, JsonObject
from rljob_api.wire.values import WireError, block
from rljob_operator.ray.http import Endpoint, NoAnswer, whole
from rljob_operator.state.observed import SubmissionState, SubmissionView

LOG_LINES = 50
LOG_LINE_CHARACTERS = 4096
_JOB_BYTES = 2**20
"""A job's state holds what was submitted, with a manifest of up to 96 KiB, and a message with its last log lines;
errors hold tracebacks."""
_LOG_BYTES = 2**20
_NAME_CHARACTERS = 253
_LAST_MILLISECOND = 253_370_764_800_000
"""Later times than the year 9999 cannot be written."""
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


class RayJobs:
    """Submits, follows and stops drivers.

    Facts are from Ray 2.60 (`dashboard/modules/job`, `dashboard/modules/state`), seen on a real head.

    Args:
        session: carries the requests.
        address: of the head's dashboard, `http://host:8265`.
        token: Ray's token, where token authentication is on.
        seconds: deadline of one request.
    """

    def __init__(
        self, session: aiohttp.ClientSession, address: str, token: str | None = None, seconds: float = 10.0
    ) -> None:
        self._endpoint = Endpoint(session, "Ray's job API", address, token, seconds)

    async def submit(self, body: JsonObject) -> None:
        """Submit a driver; an id that is known there already is a success (Ray answers 500 with a traceback).

        Raises:
            NoAnswer: it was not submitted, or it is unknown whether it was.
        """
        try:
            await self._endpoint.json("POST", "/api/jobs/", body, _JOB_BYTES)
        except NoAnswer as error:
            known = f"Job with submission_id {body['submission_id']} already exists"
            if error.code == 0 or known not in str(error):
                raise

    async def get(self, submission_id: str) -> SubmissionView:
        """The state of a submission; the head's session too unless it runs, and the last log lines once it has ended.

        Raises:
            NoAnswer: the head did not answer.
        """
        try:
            info = await self._endpoint.json("GET", f"/api/jobs/{quote(submission_id, safe='')}", largest=_JOB_BYTES)
        except NoAnswer as error:
            if error.code == 404 and "does not exist" in str(error):
                message = f"The head does not know {submission_id}."
                return SubmissionView(submission_id, SubmissionState.MISSING, message, session=await self._session())
            raise
        view = _view(submission_id, info)
        if not view.state.ended:
            return view
        lines = await self._log_tail(view)
        return replace(view, last_log_lines=lines, session=await self._session())

    async def stop(self, submission_id: str) -> None:
        """Ask for SIGTERM; harmless when it has ended or is not known.

        Raises:
            NoAnswer: the head did not answer.
        """
        try:
            await self._endpoint.json("POST", f"/api/jobs/{quote(submission_id, safe='')}/stop")
        except NoAnswer as error:
            if error.code != 404:
                raise

    async def _session(self) -> str:
        answer = await self._endpoint.json("GET", "/api/version")
        try:
            name = block(answer, "the answer")["session_name"]
            if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _NAME_CHARACTERS:
                raise ValueError(f"session_name is no name of at most {_NAME_CHARACTERS} characters")
            return name
        except (KeyError, TypeError, ValueError) as error:
            raise NoAnswer(f"Ray's dashboard answered what is no version: {error!r}") from None

    async def _log_tail(self, view: SubmissionView) -> tuple[str, ...]:
        name = quote(view.id, safe="")
        try:
            if not view.log_file:  # It never ran on a node: there is at most a short text of the job's manager.
                answer = await self._endpoint.json("GET", f"/api/jobs/{name}/logs", largest=_LOG_BYTES)
                text = str(block(answer, "the answer").get("logs") or "")
            else:
                # Read from the end of the file; /api/jobs/<id>/logs would load all of a log of any size.
                path = f"/api/v0/logs/file?{view.log_file}&lines={LOG_LINES}"
                content = await self._endpoint.content("GET", path, largest=_LOG_BYTES)
                text = content.decode(errors="replace")
        except (NoAnswer, WireError) as error:
            return (f"(the driver's log could not be read: {error})"[:LOG_LINE_CHARACTERS],)
        return last_lines(text)


def _log_file(submission_id: str, node: str | None) -> str:
    if node is None:
        return ""
    # Ray's API takes a `submission_id` too, and then answers 500: it wants the node and does not look it up.
    return f"node_id={quote(node, safe='')}&filename=job-driver-{quote(submission_id, safe='')}.log"


def last_lines(text: str) -> tuple[str, ...]:
    """The last lines of a log as the status keeps them: of a progress bar the last state, no control characters."""
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip("\n").split("\n")] if text.strip() else []
    plain = ["".join(c for c in _ESCAPE.sub("", line) if c == "\t" or c.isprintable()) for line in lines[-LOG_LINES:]]
    return tuple(line[:LOG_LINE_CHARACTERS] for line in plain)


def _view(submission_id: str, answer: Json) -> SubmissionView:
    try:
        info = block(answer, "the answer")
        code = info.get("driver_exit_code")
        return SubmissionView(
            id=submission_id,
            state=SubmissionState(info["status"]),
            message=str(info.get("message") or ""),
            exit_code=None if code is None else whole(code, "driver_exit_code", least=-INT32_MAX),
            start_time=_seconds(info.get("start_time"), "start_time"),
            end_time=_seconds(info.get("end_time"), "end_time"),
            log_file=_log_file(submission_id, info.get("driver_node_id")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise NoAnswer(f"Ray's job API answered what is no job: {error!r}") from None


def _seconds(milliseconds: object, name: str) -> float | None:
    return None if milliseconds is None else whole(milliseconds, name, most=_LAST_MILLISECOND) / 1000
