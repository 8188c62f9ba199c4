"""A server that runs programs, written from SandboxFusion's documentation of `POST /run_code`.

A test may answer in its place.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from support.loopback import on_loopback

Answer = Callable[[dict[str, Any], int], web.Response | float | None]
"""From a request's body and its number to an answer, or seconds to hang; None: the program is run."""


@dataclass
class RunCodeServer:
    answer: Answer
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def _run_code(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        given = self.answer(body, len(self.asked))
        if isinstance(given, float):
            await asyncio.sleep(given)
            return web.Response(status=500)
        if given is not None:
            return given
        return web.json_response(await _run(body))


async def _run(body: dict[str, Any]) -> dict[str, Any]:
    assert body["language"] == "python"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "main.py").write_text(body["code"], encoding="utf-8")
        begun = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "main.py", cwd=folder,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            said = await asyncio.wait_for(process.communicate((body.get("stdin") or "").encode()), body["run_timeout"])
        except TimeoutError:
            process.kill()
            await process.wait()
            took = time.monotonic() - begun
            result = {"status": "TimeLimitExceeded", "execution_time": took, "return_code": None, "stdout": ""}
            return answered("Failed", result)
    printed, errors = (text.decode("utf-8", "replace") for text in said)
    result = {
        "status": "Finished", "execution_time": time.monotonic() - begun, "return_code": process.returncode,
        "stdout": printed, "stderr": errors,
    }  # fmt: skip
    return answered("Failed" if process.returncode else "Success", result)


def answered(status: str, run_result: dict[str, Any] | None, message: str = "") -> dict[str, Any]:
    """An answer's body."""
    return {
        "status": status, "message": message, "compile_result": None, "run_result": run_result,
        "executor_pod_name": None, "files": {},
    }  # fmt: skip


@contextmanager
def running(answer: Answer = lambda body, number: None) -> Iterator[RunCodeServer]:
    """It, on a port of loopback, until the block ends."""
    server = RunCodeServer(answer)
    application = web.Application()
    application.add_routes([web.post("/run_code", server._run_code)])
    with on_loopback(application) as server.url:
        yield server
