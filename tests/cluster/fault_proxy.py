"""Stands between the operator and the API server: counts requests, and breaks some of them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import ssl
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
from aiohttp import web
from control_plane import ControlPlane
from serving import Server

WRITES = frozenset({"create", "update", "patch", "apply", "delete", "deletecollection"})
NOT_COUNTED = frozenset({"events", "leases", "tokenreviews", "subjectaccessreviews", "selfsubjectaccessreviews"})
"""Resources whose writes are no steps of a job's life."""
_LONGEST_ROW = 3
_HOP_BY_HOP = {"host", "connection", "transfer-encoding", "content-length", "keep-alive"}
_PATH = re.compile(
    r"^/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)(?:/namespaces/(?P<namespace>[^/]+)(?=/[^/]))?/(?P<resource>[^/]+)"
    r"(?:/(?P<name>[^/]+)(?:/(?P<subresource>[^/]+))?)?$"
)


@dataclass(frozen=True)
class Request:
    """One request that the operator made."""

    time: float
    verb: str
    resource: str
    subresource: str
    namespace: str
    name: str
    fault: str = ""

    @property
    def is_write(self) -> bool:
        """Whether it is a write that counts (Events and Leases do not)."""
        return self.verb in WRITES and self.resource not in NOT_COUNTED


@dataclass
class Fault:
    """A fault for requests that match; empty conditions match all.

    `kind`: `status` answers `code` without asking the API server; `drop` closes the connection before, `lose` after
    the API server carried the request out; `slow` waits `seconds` first; `cut` ends a watch after `seconds`;
    `gone` sends the 410 event that a watch gets when its resource version is too old.

    One that is left to chance happens to the same request at most three times in a row: with each failure the operator
    waits longer, in the end for longer than a test does.
    """

    kind: str
    verbs: frozenset[str] = frozenset()
    resources: frozenset[str] = frozenset()
    probability: float = 1.0
    times: int = 1_000_000
    code: int = 500
    seconds: float = 0.0

    def matches(self, request: Request, dice: random.Random) -> bool:
        """Whether it is this request's turn."""
        if self.times <= 0 or (self.verbs and request.verb not in self.verbs):
            return False
        if self.resources and request.resource not in self.resources:
            return False
        return self.probability >= 1 or dice.random() < self.probability


class FaultProxy(Server):
    """Plain HTTP towards the operator, TLS towards the API server; the operator's token passes through.

    Args:
        control_plane: whose API server.
        seed: of the faults' dice.
    """

    def __init__(self, control_plane: ControlPlane, seed: int = 0) -> None:
        super().__init__(control_plane.network)
        self._upstream = control_plane.server
        self._tls = ssl.create_default_context(cafile=str(control_plane.authority))
        self._dice = random.Random(seed)
        self._in_a_row: Counter[tuple[str, ...]] = Counter()
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._requests: list[Request] = []
        self._after: tuple[int, Callable[[], None]] | None = None
        self._watches: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession

    # --- for tests -----------------------------------------------------------------------------

    def inject(self, *faults: Fault) -> None:
        """Add faults; of those that match a request the first one happens."""
        with self._lock:
            self._faults += faults

    def heal(self) -> None:
        """Forget all faults."""
        with self._lock:
            self._faults.clear()

    def forget(self) -> None:
        """Begin to count anew."""
        with self._lock:
            self._requests.clear()

    def requests(
        self, *, since: float = 0.0, writes: bool = False, namespace: str = "", name: str = ""
    ) -> list[Request]:
        """Return what was asked since a time (`time.time()`); watches count when they begin.

        Args:
            since: a time.
            writes: only the writes that count.
            namespace: only in this namespace.
            name: only for this job: its object and those named after it.
        """
        with self._lock:
            return [
                request
                for request in self._requests
                if request.time >= since
                and (request.is_write or not writes)
                and namespace in ("", request.namespace)
                and (not name or request.name == name or request.name.startswith(f"{name}-"))
                and request.resource != "leases"
            ]

    def counts(self, **which: object) -> Counter[str]:
        """Return how many requests of `requests(...)` there were, by `verb resource/subresource`."""
        chosen = self.requests(**which)  # type: ignore[arg-type]
        return Counter(
            f"{request.verb} {request.resource}{'/' if request.subresource else ''}{request.subresource}"
            for request in chosen
        )

    def after_write(self, number: int, action: Callable[[], None]) -> None:
        """Call `action` when so many counted writes from now were carried out, before the operator gets the answer."""
        with self._lock:
            self._after = (number, action)

    def drop_watches(self) -> int:
        """Cut all open watches; return how many there were."""

        async def cut() -> int:
            for task in self._watches:
                task.cancel()
            return len(self._watches)

        cut_watches: int = self.call(cut)
        return cut_watches

    # --- serving -------------------------------------------------------------------------------

    @asynccontextmanager
    async def resources(self) -> AsyncIterator[None]:
        """One session towards the API server."""
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as self._session:
            yield

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Pass a request on, unless a fault is due."""
        asked = classify(request)
        fault = self._fault_for(asked)
        if fault is not None and fault.kind in ("slow", "lose"):
            await asyncio.sleep(fault.seconds)
        elif fault is not None and fault.kind == "status":
            return _refusal(fault.code, asked)
        elif fault is not None and fault.kind == "drop":
            return _hang_up(request)
        elif fault is not None and fault.kind == "gone":
            return _gone()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        body = await request.read()
        target = self._upstream + request.raw_path
        async with self._session.request(request.method, target, headers=headers, data=body or None) as answer:
            if asked.verb == "watch" and answer.status == HTTPStatus.OK:
                cut_after = fault.seconds if fault is not None and fault.kind == "cut" else None
                return await self._relay_watch(request, answer, cut_after)
            content = await answer.read()
            self._written(asked, answer.status)
            if fault is not None and fault.kind == "lose":
                return _hang_up(request)
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
            return web.Response(status=answer.status, body=content, headers=kept)

    async def _relay_watch(
        self, request: web.Request, answer: aiohttp.ClientResponse, seconds: float | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": answer.headers.get("Content-Type", "application/json")})
        await response.prepare(request)

        async def relay() -> None:
            async for chunk in answer.content.iter_any():
                await response.write(chunk)

        task = asyncio.create_task(relay())
        self._watches.add(task)
        try:
            await asyncio.wait_for(task, seconds)
        except (asyncio.CancelledError, TimeoutError):
            _hang_up(request)
        except (aiohttp.ClientError, ConnectionError):
            pass  # one of the two sides went away, which is how watches end
        finally:
            task.cancel()
            self._watches.discard(task)
        return response

    def _fault_for(self, asked: Request) -> Fault | None:
        with self._lock:
            thing = (asked.verb, asked.resource, asked.subresource, asked.namespace, asked.name)
            spared = self._in_a_row[thing] >= _LONGEST_ROW
            faults = (one for one in self._faults if not (spared and one.probability < 1))
            chosen = next((fault for fault in faults if fault.matches(asked, self._dice)), None)
            self._in_a_row[thing] = 0 if chosen is None else self._in_a_row[thing] + 1
            if chosen is not None:
                chosen.times -= 1
            named = "" if chosen is None else f"{chosen.kind} {chosen.code}" if chosen.kind == "status" else chosen.kind
            self._requests.append(Request(**{**asked.__dict__, "fault": named}))
        return chosen

    def _written(self, asked: Request, status: int) -> None:
        action = None
        with self._lock:
            if self._after is not None and asked.is_write and status < HTTPStatus.BAD_REQUEST:
                number, action_then = self._after
                self._after = (number - 1, action_then) if number > 1 else None
                action = action_then if number <= 1 else None
        if action is not None:
            action()


def classify(request: web.Request) -> Request:
    """Say what a request asks for."""
    match = _PATH.match(request.path)
    found = match.groupdict("") if match else {"resource": request.path, "subresource": "", "namespace": "", "name": ""}
    method = request.method
    if method == "GET":
        verb = "get" if found["name"] else "watch" if request.query.get("watch") in ("true", "1", "True") else "list"
    elif method == "PATCH":
        verb = "apply" if "apply-patch" in request.headers.get("Content-Type", "") else "patch"
    elif method == "DELETE":
        verb = "delete" if found["name"] else "deletecollection"
    else:
        verb = {"POST": "create", "PUT": "update"}.get(method, method.lower())
    return Request(
        time.time(), verb, found["resource"], found["subresource"] or "", found["namespace"] or "", found["name"] or ""
    )


def _status(code: int, message: str) -> dict[str, object]:
    reason = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "reason": reason.get(code, ""),
        "code": code,
    }


def _refusal(code: int, asked: Request) -> web.Response:
    headers = {"Retry-After": "1"} if code in (429, 503) else {}
    status = _status(code, f"made by the test for {asked.verb} {asked.resource} {asked.name}")
    return web.json_response(status, status=code, headers=headers)


def _gone() -> web.Response:
    event = {"type": "ERROR", "object": _status(410, "too old resource version: 1 (2)")}
    return web.Response(text=json.dumps(event) + "\n", content_type="application/json")


def _hang_up(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
