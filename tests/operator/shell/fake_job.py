"""A job's head and driver in this process: Ray's job API and the driver's endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class FakeJob:
    """One head on which one driver at a time runs."""

    def __init__(self) -> None:
        self.submissions: dict[str, dict[str, Any]] = {}
        self.submitted: list[dict[str, Any]] = []
        self.stops: list[str] = []
        self.checkpoints = 0
        self.refuses_checkpoints = False
        self.records: list[dict[str, Any]] = []
        self.asked_after: list[int] = []
        self.page = 1000
        """Records in one answer."""
        self.steps_answer: Any = None
        """The answer in place of records."""
        self.cookies: dict[str, str] = {}
        """Cookies that came back, of those that every answer sets."""
        self.unwritten: dict[str, str] = {}
        """Writes that the driver goes on without, and why."""
        self.engine_nodes: dict[str, Any] | None = None
        self.ready = True
        self.dead_driver = False
        """Whether the driver takes connections and does not answer."""
        self.ended = False
        """Whether its process is gone, which takes none."""
        self.asks = 0
        self.asks_of_ray = 0
        self.log = "line 1\nline 2\n"
        self.session = "session_1"
        self.url = ""

    def step(self, seconds: float = 2.0, size: int = 0) -> None:
        """The driver completes a step, whose record has at least `size` bytes."""
        index = len(self.records)
        self.records.append(
            {
                "index": index,
                "step": index + 1,
                "attempt": 0,
                "rerun": False,
                "time": 1.8e9 + index,
                "step_seconds": seconds,
                "phases": {
                    "rollout": seconds * 0.6,
                    "actor_train": seconds * 0.3,
                    "checkpoint": seconds * 0.05,
                    "sleep": seconds * 0.05,
                },
                "other": 0.0,
                "switch_seconds": 0.0,
                "metrics": {
                    "rollout/raw_reward": 0.5,
                    "rollout/reward_parts/format": 0.5,
                    "rollout/response_len/mean": 6.5,
                    "train/train_rollout_logprob_abs_diff": 0.001,
                },
                "weights": {"version": index + 1, "bytes": 100},
                "long": "x" * size,
                "memory": {"trainer-0": {"sleep": {"used": 100}}, "engine-0": {"wake": {"used": 50}}},
            }
        )

    def end(self, state: str, code: int) -> None:
        """The driver's process ends."""
        for info in self.submissions.values():
            if info["status"] == "RUNNING":
                info.update(status=state, driver_exit_code=code, end_time=1800000000000)
        self.ended = True

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.cookies.update(request.cookies)
        response = await self._answer(request)
        response.set_cookie("job", "one")
        return response

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asks += 1
        self.asks_of_ray += request.path.startswith("/api/jobs/")
        path, name = request.path, request.path.split("/")[3] if request.path.startswith("/api/jobs/") else ""
        if path.startswith("/v1/") and self.dead_driver:
            await asyncio.sleep(30)
        if path.startswith("/v1/") and self.ended and request.transport is not None:
            request.transport.abort()
        match path:
            case "/api/jobs/":
                return await self._submit(request)
            case "/api/version":
                return web.json_response({"session_name": self.session})
            case "/api/v0/logs/file":
                return web.Response(text=self.log)
            case "/v1/status":
                return web.json_response(self._status())
            case "/v1/steps":
                after = int(request.query["after"])
                self.asked_after.append(after)
                page = {"steps": self.records[after + 1 :][: self.page], "total": len(self.records)}
                return web.json_response(page if self.steps_answer is None else self.steps_answer)
            case "/v1/checkpoint":
                self.checkpoints += 1
                if self.refuses_checkpoints:
                    return web.Response(status=500, text="no")
                return web.json_response({"accepted": True}, status=202)
            case "/v1/engine-nodes":
                assert self.engine_nodes is not None
                self.engine_nodes["wanted"] = int(request.query["wanted"])
                return web.json_response({"accepted": True}, status=202)
        if path.endswith("/stop"):
            self.stops.append(name)
            self.end("STOPPED", 75)
            return web.json_response({"stopped": True})
        if name in self.submissions:
            return web.json_response(self.submissions[name])
        return web.Response(status=404, text=f"Job {name} does not exist")

    async def _submit(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["submission_id"]
        if name in self.submissions:
            return web.Response(status=500, text=f"ValueError: Job with submission_id {name} already exists. Please")
        self.submitted.append(body)
        self.dead_driver = self.ended = False
        self.submissions[name] = {
            "status": "RUNNING",
            "message": "",
            "start_time": 1800000000000,
            "end_time": None,
            "driver_exit_code": None,
            "driver_node_id": "ab",
        }
        return web.json_response({"submission_id": name})

    def _status(self) -> dict[str, Any]:
        return {
            "ready": self.ready,
            "step": len(self.records),
            "steps": 1000,
            "phase": "rollout",
            "attempt": 0,
            "weight_version": len(self.records),
            "last_checkpoint_step": None,
            "stopping": False,
            "engine_nodes": self.engine_nodes,
            "write_failures": dict.fromkeys(self.unwritten, 3),
            "write_messages": self.unwritten,
        }


@asynccontextmanager
async def serving_job(job: FakeJob) -> AsyncIterator[FakeJob]:
    """Serve on a free port of this machine."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", job.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    job.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield job
    finally:
        await runner.cleanup()
