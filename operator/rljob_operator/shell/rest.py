"""Requests to the API server. Each has a deadline, and tells what went wrong in the server's own words."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from rljob_operator.shell.connection import Connection
from rljob_operator.shell.metrics import OperatorMetrics
from rljob_operator.shell.resources import FIELD_MANAGER, Resource

JSON = "application/json"
APPLY_PATCH = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
_CONNECT_SECONDS = 5.0
_PAUSE_SECONDS = 1.0


class ApiError(Exception):
    """The API server refused, or did not answer in time.

    Attributes:
        code: HTTP status; 0: no answer.
        reason: the server's word for it, like `Conflict`, `AlreadyExists`, `Expired`; `NoAnswer` without an answer.
        retry_after: seconds that the server asks to wait, if it does.
    """

    def __init__(self, code: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.retry_after = retry_after


class ApiClient:
    """The operator's side of the API server.

    Args:
        connection: the server and the credentials.
        metrics: where requests are counted.
        try_seconds: deadline of one try.
        total_seconds: deadline of a request with all its tries; while it lasts, a server that asks to wait (429, 503
            with Retry-After) is obeyed, and a connection that broke is opened once more.
        places: requests at the same time; watches have places of their own.
    """

    def __init__(
        self,
        connection: Connection,
        metrics: OperatorMetrics,
        try_seconds: float = 10.0,
        total_seconds: float = 30.0,
        places: int = 16,
    ) -> None:
        self._connection = connection
        self._metrics = metrics
        self._try_seconds = try_seconds
        self._total_seconds = total_seconds
        self._places = asyncio.Semaphore(places)
        connector = aiohttp.TCPConnector(limit=0, ssl=connection.tls or True, keepalive_timeout=60)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**18
        )

    async def close(self) -> None:
        """End all connections."""
        await self._session.close()

    async def get(self, resource: Resource, namespace: str | None, name: str) -> dict[str, Any]:
        """Read one object."""
        return await self.request("GET", resource.path(namespace, name))

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create one object; ApiError with reason `AlreadyExists` when it is there."""
        params = {"fieldManager": FIELD_MANAGER}
        return await self.request("POST", resource.path(namespace), params=params, body=body)

    async def apply(
        self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any], subresource: str | None = None
    ) -> dict[str, Any]:
        """Server-side apply: the fields in `body` become ours, those that we sent before and not now are given up."""
        params = {"fieldManager": FIELD_MANAGER, "force": "true"}
        path = resource.path(namespace, name, subresource)
        return await self.request("PATCH", path, params=params, body=body, content_type=APPLY_PATCH)

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> dict[str, Any]:
        """Delete the object with this UID, never another one of that name (ApiError with code 409)."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        return await self.request(
            "DELETE", resource.path(namespace, name), body={**body, "preconditions": {"uid": uid}}
        )

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = JSON,
        total_seconds: float | None = None,
    ) -> dict[str, Any]:
        """Send a request and return the answer's JSON.

        Raises:
            ApiError: refused, or not answered by the deadline.
        """
        until = time.monotonic() + (self._total_seconds if total_seconds is None else total_seconds)
        data = None if body is None else json.dumps(body).encode()
        reconnected = False
        while True:
            left = min(self._try_seconds, until - time.monotonic())
            try:
                async with self._places:
                    return await self._try(method, path, params, data, content_type, left)
            except ApiError as error:
                pause = self._pause(error, reconnected)
                if pause is None or time.monotonic() + pause >= until:
                    raise
                reconnected = reconnected or error.code == 0
            await asyncio.sleep(pause)

    async def text(self, path: str, params: Mapping[str, str]) -> str:
        """What is no JSON: a container's log.

        Raises:
            ApiError: refused, or not answered by the deadline of one try.
        """
        try:
            async with asyncio.timeout(self._try_seconds), self._open("GET", path, params, None, JSON) as response:
                return await response.text(errors="replace")
        except TimeoutError:
            raise ApiError(0, "NoAnswer", f"GET {path}: no answer within {self._try_seconds:.0f} s") from None
        except aiohttp.ClientError as error:
            raise ApiError(0, "Disconnected", f"GET {path}: {error or type(error).__name__}") from None

    @staticmethod
    def _pause(error: ApiError, reconnected: bool) -> float | None:
        if error.code == 429 or (error.code == 503 and error.retry_after is not None):
            return _PAUSE_SECONDS if error.retry_after is None else error.retry_after
        return 0.05 if error.reason == "Disconnected" and not reconnected else None

    async def _try(
        self, method: str, path: str, params: Mapping[str, str] | None, data: bytes | None, kind: str, seconds: float
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(max(seconds, 0.001)), self._open(method, path, params, data, kind) as response:
                content = await response.json(content_type=None)
        except TimeoutError:
            self._metrics.requests.labels(method, "timeout").inc()
            raise ApiError(0, "NoAnswer", f"{method} {path}: no answer within {seconds:.0f} s") from None
        except aiohttp.ClientError as error:
            self._metrics.requests.labels(method, "disconnected").inc()
            raise ApiError(0, "Disconnected", f"{method} {path}: {error or type(error).__name__}") from None
        except ValueError as error:
            raise ApiError(0, "NoAnswer", f"{method} {path}: the answer is no JSON: {error}") from None
        if not isinstance(content, dict):
            raise ApiError(0, "NoAnswer", f"{method} {path}: the answer is no object")
        return content

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, params: Mapping[str, str] | None, data: bytes | None, kind: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"Accept": JSON, "User-Agent": FIELD_MANAGER}
        token = self._connection.token()
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        if data is not None:
            headers["Content-Type"] = kind
        url = self._connection.server + path
        async with self._session.request(
            method, url, params=params, data=data, headers=headers, allow_redirects=False
        ) as response:
            self._metrics.requests.labels(method, str(response.status)).inc()
            if response.status >= 400:
                raise await _refusal(method, path, response)
            yield response

    @asynccontextmanager
    async def watch(self, path: str, params: Mapping[str, str]) -> AsyncIterator[aiohttp.StreamReader]:
        """Open a watch; the body's lines are its events. Only opening it has a deadline here."""
        opening = self._open("GET", path, params, None, JSON)
        try:
            async with asyncio.timeout(self._try_seconds):
                response = await opening.__aenter__()
        except TimeoutError:
            raise ApiError(0, "NoAnswer", f"watch {path}: no answer within {self._try_seconds:.0f} s") from None
        except aiohttp.ClientError as error:
            raise ApiError(0, "Disconnected", f"watch {path}: {error or type(error).__name__}") from None
        try:
            yield response.content
        finally:
            # Not released but closed: the rest of a watch never ends.
            response.close()
            await opening.__aexit__(None, None, None)


async def _refusal(method: str, path: str, response: aiohttp.ClientResponse) -> ApiError:
    text = await response.text(errors="replace")
    try:
        status = json.loads(text)
        reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    except (ValueError, AttributeError):
        reason, message = "", text[:500]
    return ApiError(
        response.status,
        reason or response.reason or "",
        f"{method} {path}: {response.status} {message or response.reason}",
        _seconds(response.headers.get("Retry-After")),
    )


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() else None
