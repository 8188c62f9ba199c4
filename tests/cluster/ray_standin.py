"""Stands in for Ray's dashboard and for the driver in the head pods of kwok's nodes, which run nothing.

`/ray/NAMESPACE/CLUSTER/...` answers as Ray 2.60's job API does (ray/dashboard/modules/job/{job_head,job_agent,
job_supervisor}.py), `/driver/NAMESPACE/CLUSTER/...` as the driver's endpoint. Both only while the cluster has a
running head pod; a new head has none of the old one's submissions, and a lost worker pod makes the driver end with
1.
"""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from control_plane import ControlPlane
from ray_driver import EXIT_STOPPED, Driver, Run, Script
from serving import Server

Key = tuple[str, str]
STOP_WAIT_SECONDS = 3.0
"""Seconds that Ray waits after SIGTERM before SIGKILL, unless RAY_JOB_STOP_WAIT_TIME_S says otherwise."""
NOTICE_SECONDS = 0.5
"""Seconds until a driver finds that a process of it is gone."""
_NODE_ID = "0" * 56
_TERMINAL = ("STOPPED", "SUCCEEDED", "FAILED")


@dataclass
class Submission:
    """One Ray job on one head."""

    id: str
    body: dict[str, Any]
    status: str = "PENDING"
    message: str = "Job has not started yet. It may be waiting for the runtime environment to be set up."
    error_type: str | None = None
    start_time: int = field(default_factory=lambda: int(time.time() * 1000))
    end_time: int | None = None
    exit_code: int | None = None
    driver: Driver | None = None
    task: asyncio.Task[None] | None = None
    stop_asked: bool = False

    def end(self, status: str, message: str, exit_code: int | None = None, error_type: str | None = None) -> None:
        """Enter a terminal state, once."""
        if self.status not in _TERMINAL:
            self.status, self.message, self.exit_code, self.error_type = status, message, exit_code, error_type
            self.end_time = int(time.time() * 1000)

    @property
    def log(self) -> str:
        """The driver's log file."""
        return "".join(f"{line}\n" for line in (self.driver.log if self.driver is not None else []))

    def details(self) -> dict[str, Any]:
        """Ray's JobDetails."""
        started = self.status != "PENDING"
        return {
            "type": "SUBMISSION",
            "job_id": "02000000" if started else None,
            "submission_id": self.id,
            "driver_info": {"id": "02000000", "node_ip_address": "10.88.0.1", "pid": "1"} if started else None,
            "status": self.status,
            "entrypoint": self.body["entrypoint"],
            "message": self.message,
            "error_type": self.error_type,
            "start_time": self.start_time,
            "end_time": self.end_time,
            "metadata": self.body.get("metadata") or {},
            "runtime_env": self.body.get("runtime_env") or {},
            "driver_agent_http_address": "http://10.88.0.1:52365" if started else None,
            "driver_node_id": _NODE_ID if started else None,
            "driver_exit_code": self.exit_code,
        }


@dataclass
class Head:
    """One head pod: its submissions go with it."""

    uid: str
    cluster_uid: str
    environment: dict[str, str]
    submissions: dict[str, Submission] = field(default_factory=dict)
    sessions: int = 0

    @property
    def session(self) -> str:
        """Name of the Ray session: another one after Ray was started anew."""
        return f"session_{self.uid}_{self.sessions}"

    @property
    def driver(self) -> Driver | None:
        """The driver that runs now."""
        running = (one.driver for one in self.submissions.values() if one.status == "RUNNING")
        return next(running, None)


class RayStandIn(Server):
    """Plays all Ray clusters of a control plane. A script may be changed at any time, for the attempts that follow."""

    def __init__(self, control_plane: ControlPlane) -> None:
        super().__init__(control_plane.network)
        self.scripts: dict[Key, Script] = {}
        self.default_script = Script()
        self.runs: dict[str, Run] = {}
        self.accepted: list[tuple[Key, str]] = []
        """Submissions that were accepted, in order: no id may come twice for one head."""
        self.asked: list[tuple[float, Key, str]] = []
        """(time, cluster, method and path) of every request."""
        self._control_plane = control_plane
        self._heads: dict[Key, Head] = {}
        self._workers: dict[Key, set[str]] = {}
        self._session: aiohttp.ClientSession

    # --- for tests -----------------------------------------------------------------------------

    @property
    def ray_address(self) -> str:
        """Template of the operator's setting."""
        return f"{self.url}/ray/{{namespace}}/{{name}}"

    @property
    def driver_address(self) -> str:
        """Template of the operator's setting."""
        return f"{self.url}/driver/{{namespace}}/{{name}}"

    def script(self, namespace: str, name: str, *attempts: Any) -> Script:
        """Say what the attempts of a job do; without attempts, return its script."""
        script = self.scripts.setdefault((namespace, name), Script())
        if attempts:
            script.attempts = list(attempts)
        return script

    def submissions(self, namespace: str, name: str) -> list[str]:
        """Ids that were accepted for a job, over all its heads."""
        return [submission for key, submission in self.accepted if key == (namespace, name)]

    def requests(self, namespace: str, name: str, since: float = 0.0) -> list[str]:
        """Requests for a job since a time."""
        return [what for when, key, what in self.asked if key == (namespace, name) and when >= since]

    def run_of(self, uid: str) -> Run:
        """The run folder of the job with this UID."""
        return self.runs.setdefault(uid, Run())

    def kill_driver(self, namespace: str, name: str, exit_code: int = -int(signal.SIGKILL), *log: str) -> None:
        """Let the running driver end at once."""

        async def kill() -> None:
            for submission in self._heads[(namespace, name)].submissions.values():
                if submission.status == "RUNNING":
                    _fail(submission, exit_code, log)

        self.call(kill)

    def forget_submissions(self, namespace: str, name: str) -> None:
        """Let the head lose its submissions, as when its processes were restarted inside the pod."""

        async def forget() -> None:
            head = self._heads[(namespace, name)]
            _kill(head)
            head.submissions.clear()
            head.sessions += 1

        self.call(forget)

    # --- following the pods --------------------------------------------------------------------

    @asynccontextmanager
    async def resources(self) -> AsyncIterator[None]:
        """A session towards the API server, and the watch of the Ray pods."""
        tls = ssl.create_default_context(cafile=str(self._control_plane.authority))
        headers = {"Authorization": f"Bearer {self._control_plane.admin_token}"}
        connector = aiohttp.TCPConnector(ssl=tls)
        async with aiohttp.ClientSession(self._control_plane.server, connector=connector, headers=headers) as session:
            self._session = session
            following = asyncio.create_task(self._follow_pods())
            try:
                yield
            finally:
                following.cancel()
                with suppress(asyncio.CancelledError):
                    await following
                for head in self._heads.values():
                    _kill(head)

    async def _follow_pods(self) -> None:
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                query = {"labelSelector": "ray.io/cluster", "watch": "true", "timeoutSeconds": "3000"}
                timeout = aiohttp.ClientTimeout(total=None)
                async with self._session.get("/api/v1/pods", params=query, timeout=timeout) as answer:
                    async for line in answer.content:
                        event = json.loads(line)
                        await self._pod_changed(event["type"], event["object"])
            await asyncio.sleep(0.2)

    async def _pod_changed(self, event: str, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        key = (metadata["namespace"], metadata["labels"]["ray.io/cluster"])
        gone = event == "DELETED" or "deletionTimestamp" in metadata or pod["status"].get("phase") != "Running"
        head = self._heads.get(key)
        if metadata["labels"].get("ray.io/node-type") == "head":
            if gone and head is not None and head.uid == metadata["uid"]:
                _kill(self._heads.pop(key))
            elif not gone and (head is None or head.uid != metadata["uid"]):
                environment = await self._environment(key[0], pod)
                self._heads[key] = Head(metadata["uid"], _cluster_uid(metadata), environment)
        elif not gone:
            self._workers.setdefault(key, set()).add(metadata["uid"])
        elif metadata["uid"] in self._workers.get(key, set()):
            self._workers[key].discard(metadata["uid"])
            asyncio.get_running_loop().call_later(NOTICE_SECONDS, self._worker_lost, key, metadata)

    def _worker_lost(self, key: Key, worker: dict[str, Any]) -> None:
        """The driver finds that its actors are gone; that of a cluster made anew under the name never had them."""
        head = self._heads.get(key)
        if head is not None and head.cluster_uid == _cluster_uid(worker):
            for submission in head.submissions.values():
                _fail(submission, 1, (f"ProcessDiedError: pod {worker['name']} is gone",))

    async def _environment(self, namespace: str, pod: dict[str, Any]) -> dict[str, str]:
        """Variables of the head container, secrets looked up as kubelet would."""
        found = {}
        for variable in pod["spec"]["containers"][0].get("env", []):
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference is None:
                found[variable["name"]] = variable.get("value", "")
                continue
            async with self._session.get(f"/api/v1/namespaces/{namespace}/secrets/{reference['name']}") as answer:
                if answer.status == 200:
                    secret = await answer.json()
                    found[variable["name"]] = base64.b64decode(secret["data"][reference["key"]]).decode()
        return found

    # --- answering -----------------------------------------------------------------------------

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer for a cluster's head, or close the connection where there is none."""
        _, part, namespace, cluster, *rest = request.path.split("/", 4)
        key = (namespace, cluster)
        path = "/" + "".join(rest)
        self.asked.append((time.time(), key, f"{request.method} {path}"))
        head = self._heads.get(key)
        if head is None:
            return _refuse_connection(request)
        if part == "driver":
            return self._answer_driver(request, head, path)
        refusal = _ray_refusal(request, head)
        if refusal is not None:
            return refusal
        if path == "/api/jobs/" and request.method == "POST":
            return await self._submit(request, key, head)
        if path == "/api/version":
            version = {"version": "4", "ray_version": "2.60.0", "ray_commit": "", "session_name": head.session}
            return web.json_response(version)
        if path == "/api/v0/logs/file":
            return _answer_log(request.query, head)
        return _answer_job(request.method, path, head)

    async def _submit(self, request: web.Request, key: Key, head: Head) -> web.Response:
        body = await request.json()
        if not isinstance(body.get("entrypoint"), str):
            return web.Response(status=400, text="TypeError: missing required argument 'entrypoint'")
        submission = Submission(body["submission_id"], body)
        if submission.id in head.submissions:
            # The head wraps the agent's 400 into a 500 (job_head.py, _raise_error).
            text = (
                "Traceback (most recent call last):\n"
                "RuntimeError: Request failed with status code 400: Traceback (most recent call last):\n"
                f"ValueError: Job with submission_id {submission.id} already exists. "
                "Please use a different submission_id.\n."
            )
            return web.Response(status=500, text=text)
        head.submissions[submission.id] = submission
        self.accepted.append((key, submission.id))
        script = self.scripts.get(key, self.default_script)
        submission.task = asyncio.create_task(self._work(submission, head, script))
        return web.json_response({"job_id": submission.id, "submission_id": submission.id})

    async def _work(self, submission: Submission, head: Head, script: Script) -> None:
        await asyncio.sleep(0.02)
        environment = (submission.body.get("runtime_env") or {}).get("env_vars") or {}
        uid = submission.id.removeprefix("rljob-").rpartition("-")[0]
        try:
            submission.driver = Driver(self.run_of(uid), script, environment)
        except Exception as error:  # the manifest is the operator's: what is wrong with it must be seen in the test
            submission.end("FAILED", f"Job entrypoint command failed with exit code 2: {error!r}", 2)
            return
        submission.status, submission.message = "RUNNING", "Job is currently running."
        if submission.stop_asked:
            submission.driver.stopping.set()
        code = await submission.driver.work()
        if submission.stop_asked:
            submission.end("STOPPED", "Job was intentionally stopped.")
        elif code == 0:
            submission.end("SUCCEEDED", "Job finished successfully.", 0)
        else:
            _fail(submission, code, ())

    def _answer_driver(self, request: web.Request, head: Head, path: str) -> web.StreamResponse:
        driver = head.driver
        if driver is None or not driver.ready:
            return _refuse_connection(request)
        token = head.environment.get("RLJOB_DRIVER_TOKEN", "")
        if token and request.headers.get("Authorization") != f"Bearer {token}":
            return web.json_response({"error": "a bearer token is needed"}, status=401)
        if path == "/v1/status":
            return web.json_response(driver.status())
        if path == "/v1/steps":
            return web.json_response(driver.steps(int(request.query.get("after", "-1"))))
        if path == "/v1/checkpoint" and request.method == "POST":
            driver.run.checkpoints_requested += 1
            driver.save()
            return web.json_response({"accepted": True}, status=202)
        return web.json_response({"error": f"no such path: {path}"}, status=404)


def _answer_job(method: str, path: str, head: Head) -> web.Response:
    parts = path.removeprefix("/api/jobs/").split("/")
    if path == "/api/jobs/":
        return web.json_response([one.details() for one in head.submissions.values()])
    submission = head.submissions.get(parts[0])
    if submission is None:
        return web.Response(status=404, text=f"Job {parts[0]} does not exist")
    if parts[1:] == ["stop"] and method == "POST":
        running = submission.status not in _TERMINAL
        if running and not submission.stop_asked:
            _stop(submission, float(head.environment.get("RAY_JOB_STOP_WAIT_TIME_S", STOP_WAIT_SECONDS)))
        return web.json_response({"stopped": running})
    if parts[1:] == ["logs"]:
        return web.json_response({"logs": submission.log})
    return web.json_response(submission.details())


def _answer_log(query: Mapping[str, str], head: Head) -> web.Response:
    """The end of a file in Ray's log folder, as ray/dashboard/modules/state/state_head.py streams it."""
    name = query.get("filename", "").removeprefix("job-driver-").removesuffix(".log")
    submission = head.submissions.get(name)
    if submission is None or query.get("node_id") != _NODE_ID:
        return web.Response(status=500, text=f"Could not find log file {query.get('filename')}")
    lines = submission.log.splitlines(keepends=True)[-int(query.get("lines", "1000")) :]
    return web.Response(text="".join(lines), content_type="text/plain")


def _stop(submission: Submission, seconds: float) -> None:
    """SIGTERM, and SIGKILL when the driver takes longer than Ray waits."""
    submission.stop_asked = True
    if submission.driver is not None:
        submission.driver.stopping.set()

    def kill() -> None:
        if submission.status not in _TERMINAL and submission.task is not None:
            submission.task.cancel()
            submission.end("STOPPED", "Job was intentionally stopped.")

    asyncio.get_running_loop().call_later(seconds, kill)


def _fail(submission: Submission, exit_code: int, log: tuple[str, ...]) -> None:
    if submission.status in _TERMINAL:
        return
    lines = submission.driver.log if submission.driver is not None else []
    lines += log
    tail = "\n".join(lines[-10:])
    message = (
        f"Job entrypoint command failed with exit code {exit_code}, "
        f"last available logs (truncated to 20,000 chars):\n{tail}"
    )
    submission.end("FAILED", message, exit_code, "JOB_ENTRYPOINT_COMMAND_ERROR")
    if submission.task is not None and submission.task is not asyncio.current_task():
        submission.task.cancel()


def _kill(head: Head) -> None:
    for submission in head.submissions.values():
        if submission.task is not None:
            submission.task.cancel()


def _cluster_uid(pod: dict[str, Any]) -> str:
    """UID of the RayCluster that a pod, whose metadata this is, belongs to; empty for one that a test made itself."""
    owners = pod.get("ownerReferences", [])
    return next((owner["uid"] for owner in owners if owner["kind"] == "RayCluster"), "")


def _ray_refusal(request: web.Request, head: Head) -> web.Response | None:
    """Ray's token authentication (ray/_private/authentication/http_token_authentication.py)."""
    token = head.environment.get("RAY_AUTH_TOKEN")
    if head.environment.get("RAY_AUTH_MODE") != "token" or not token:
        return None
    given = request.headers.get("Authorization") or request.headers.get("X-Ray-Authorization")
    if not given:
        return web.Response(status=401, text="Unauthorized: Missing authentication token")
    if given != f"Bearer {token}":
        return web.Response(status=403, text="Forbidden: Invalid authentication token")
    return None


def _refuse_connection(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


__all__ = ["EXIT_STOPPED", "Head", "RayStandIn", "Submission"]
