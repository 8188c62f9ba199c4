"""Reaching a job's head from outside the cluster: through the API server, or else by a port-forward."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp

from rljob_api.json_types import Json
from rljob_api.wire import names
from rljob_operator.plugin.cluster import Cluster
from rljob_operator.plugin.problems import from_api
from rljob_operator.ray.driver import Driver
from rljob_operator.ray.http import NoAnswer
from rljob_operator.ray.jobs import RayJobs
from rljob_operator.render import secret_name
from rljob_operator.shell.api.client import ApiError
from rljob_operator.shell.api.owners import is_controlled_by
from rljob_operator.shell.api.resources import PODS, JobKey
from rljob_operator.shell.api.tokens import Tokens
from rljob_operator.shell.caches.views import ClusterState

_PROBES = {names.DRIVER_PORT: names.HEALTH_PATH, names.DASHBOARD_PORT: "/api/version"}
_PROXY_SECONDS = 4.0
_FORWARD_SECONDS = 15.0
_PEEK = {names.PEEK_HEADER: "1"}
"""So that a driver that lingers at its end goes on waiting for the operator."""


class NoWay(NoAnswer):
    """The user cannot get to the head, which says nothing about the head."""


class Head:
    """The head of a job's cluster.

    Args:
        cluster: where it is.
        job: namespace and name of the job.
        uid: UID of the job.
        state: the job's RayCluster.
        stack: closes what is opened.
    """

    def __init__(self, cluster: Cluster, job: JobKey, uid: str, state: ClusterState, stack: AsyncExitStack) -> None:
        self._cluster = cluster
        self._job = job
        self._uid = uid
        self._state = state
        self._stack = stack
        self._tokens = Tokens(cluster.client)

    async def driver(self, seconds: float = 10.0) -> Driver:
        """The driver's endpoint.

        Args:
            seconds: deadline of one request.

        Raises:
            NoAnswer: it cannot be reached, or its token cannot be read.
        """
        token = await self._token(self._uid, secret_name(self._job.name), names.DRIVER_TOKEN_KEY)
        return Driver(*await self.address(names.DRIVER_PORT), token, seconds)

    async def jobs(self) -> RayJobs:
        """Ray's job API.

        Raises:
            NoAnswer: it cannot be reached, or its token cannot be read.
        """
        return RayJobs(*await self.address(names.DASHBOARD_PORT), await self.ray_token())

    async def ray_token(self) -> str | None:
        """Ray's token, or None where its API asks for none."""
        if not self._state.token_secret:
            return None
        return await self._token(self._state.view.uid, self._state.token_secret, names.RAY_TOKEN_KEY)

    async def address(self, port: int) -> tuple[aiohttp.ClientSession, str]:
        """A session and the address to use with it.

        The API server's proxy is cheaper and needs no second program, but it comes from the control plane, which the
        head's NetworkPolicy shuts out where it is enforced; a port-forward begins inside the pod.

        Raises:
            NoWay: neither way leads to the pod.
            NoAnswer: nothing listens on the port.
        """
        pod = self._state.view.head_pod
        if pod is None:
            raise NoAnswer(f"RayCluster {self._job.name} has no head pod")
        await self._check_owner(pod)
        refused = ""
        try:
            return await self._by_proxy(pod, port)
        except NoAnswer as error:
            refused = str(error)
            if "connection refused" in refused:
                raise NoAnswer(f"nothing listens on port {port} of pod {pod}") from None
        try:
            return await self._by_forward(pod, port)
        except NoAnswer as error:
            raise NoWay(f"pod {pod} cannot be reached: {refused}; by port-forward: {error}") from None

    async def _check_owner(self, pod: str) -> None:
        """Tokens go to the cluster's own pod alone, and not to one that somebody made under its name."""
        try:
            item = await self._cluster.client.get(PODS, self._job.namespace, pod)
        except ApiError as error:
            raise NoWay(str(from_api(error, f"read pod {pod}, the head"))) from None
        if not is_controlled_by(item, self._state.view.uid):
            raise NoAnswer(f"pod {pod} is not one of RayCluster {self._job.name}")

    async def _token(self, owner: str, secret: str, key: str) -> str:
        try:
            token = await self._tokens.read(self._job, owner, secret, key)
        except ApiError as error:
            raise NoWay(str(from_api(error, f"read Secret {secret}, which holds the token"))) from None
        if token is None:
            raise NoAnswer(f"Secret {secret} is not there, is not this job's, or has no key {key}")
        return token

    async def _by_proxy(self, pod: str, port: int) -> tuple[aiohttp.ClientSession, str]:
        access = self._cluster.access

        async def behind(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
            """The API server keeps `Authorization` for itself (apiserver pkg/endpoints/filters/authentication.go); Ray
            and the driver each take a second header."""
            if own := request.headers.pop("Authorization", None):
                request.headers["X-Ray-Authorization"] = request.headers[names.DRIVER_AUTHORIZATION_HEADER] = own
            if token := await access.configuration.get_api_key_with_prefix("BearerToken"):
                request.headers["Authorization"] = token
            return await handler(request)

        connector = aiohttp.TCPConnector(ssl=access.tls)
        session = aiohttp.ClientSession(
            connector=connector, headers=_PEEK, middlewares=(behind,), proxy=access.configuration.proxy
        )
        await self._stack.enter_async_context(session)
        address = f"{access.configuration.host}/api/v1/namespaces/{self._job.namespace}/pods/{pod}:{port}/proxy"
        try:
            async with asyncio.timeout(_PROXY_SECONDS), session.get(address + _PROBES[port]) as response:
                content = await response.json(content_type=None)
        except TimeoutError:
            raise NoAnswer(f"the API server's proxy did not answer within {_PROXY_SECONDS:g} s") from None
        except ValueError:
            return session, address  # Whatever answered, it is not the API server with a refusal.
        except aiohttp.ClientError as error:
            raise NoAnswer(f"the API server's proxy: {error}") from None
        if refusal := _refusal(content):
            code = refusal.get("code")
            code = code if isinstance(code, int) and code else response.status
            denied = ApiError(code, str(refusal.get("reason")), str(refusal["message"]))
            raise NoAnswer(str(from_api(denied, f"go through the API server to pod {pod}")))
        return session, address

    async def _by_forward(self, pod: str, port: int) -> tuple[aiohttp.ClientSession, str]:
        program = shutil.which("kubectl")
        if program is None:
            raise NoAnswer("kubectl is not on the PATH")
        process = await asyncio.create_subprocess_exec(
            program,
            *self._cluster.access.arguments,
            f"--namespace={self._job.namespace}",
            "port-forward",
            "--address=127.0.0.1",
            f"pod/{pod}",
            f":{port}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        self._stack.push_async_callback(_end, process)
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(_FORWARD_SECONDS):
                line = (await process.stdout.readline()).decode(errors="replace")
                found = re.search(r"127\.0\.0\.1:(\d+) ->", line)
                if found is None:
                    said = (await process.stderr.read()).decode(errors="replace").strip()
                    raise NoAnswer(f"kubectl port-forward: {said or line.strip() or 'ended'}")
        except TimeoutError:
            raise NoAnswer(f"kubectl port-forward did not begin within {_FORWARD_SECONDS:g} s") from None
        session = aiohttp.ClientSession(headers=_PEEK)
        await self._stack.enter_async_context(session)
        return session, f"http://127.0.0.1:{found[1]}"


@asynccontextmanager
async def open_head(cluster: Cluster, job: JobKey, uid: str, state: ClusterState) -> AsyncIterator[Head]:
    """A job's head; what was opened to reach it ends with the block."""
    async with AsyncExitStack() as stack:
        yield Head(cluster, job, uid, state, stack)


def _refusal(content: object) -> dict[str, Json] | None:
    """The API server's own answer, which is no answer of the pod."""
    return content if isinstance(content, dict) and content.get("kind") == "Status" and "message" in content else None


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(2.0):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
