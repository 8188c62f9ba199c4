"""Requests by the official client; around each a deadline, a count, and the server's own words when it refuses."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from copy import copy
from email.utils import parsedate_to_datetime
from typing import cast

import aiohttp
from kubernetes.aio.client import ApiClient as OfficialClient
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException

from rljob_api.json_types import Json
from rljob_operator.kubernetes_objects import Item, Manifest
from rljob_operator.shell.api.access import AccessProblem
from rljob_operator.shell.api.metrics import OperatorMetrics
from rljob_operator.shell.api.resources import FIELD_MANAGER, Resource

JSON = "application/json"
JSON_PATCH = "application/json-patch+json"
APPLY_PATCH = "application/apply-patch+yaml; charset=utf-8"
"""With the parameter the `kubernetes` package sends the text that it is given; without, it makes JSON of it."""
MERGE_PATCH = "application/merge-patch+json"
_PAUSE_SECONDS = 1.0
_CLOCKS_AGREE_SECONDS = 3.0
"""A smaller difference is that of an answer's way."""
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
"""In the terms of YAML 1.2, section 5.1, beside what `json` escapes itself; and what it takes for a line's end."""


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


class _OfficialClient(OfficialClient):
    def sanitize_for_serialization(self, obj: object) -> object:
        """The library copies each body for what is no JSON in it, which takes longer than to send it; none has such."""
        return obj


class ApiClient:
    """The operator's side of the API server: everything but Kopf's lists and watches.

    Args:
        configuration: the server and the credentials.
        metrics: where requests are counted.
        try_seconds: deadline of one try.
        total_seconds: deadline of a request with all its tries; while it lasts, a server that asks to wait (429, 503
            with Retry-After) is obeyed, and a connection that broke is opened once more.
        places: requests at the same time.
    """

    def __init__(
        self,
        configuration: Configuration,
        metrics: OperatorMetrics,
        try_seconds: float = 10.0,
        total_seconds: float = 30.0,
        places: int = 16,
    ) -> None:
        own = copy(configuration)
        # The library would send requests through the environment's proxies, and read ~/.netrc for them.
        own.client_session_kwargs = {"trust_env": False, "cookie_jar": aiohttp.DummyCookieJar()}
        self._official = _OfficialClient(own)
        self._official.user_agent = FIELD_MANAGER
        self._metrics = metrics
        self._try_seconds = try_seconds
        self._total_seconds = total_seconds
        self._places = asyncio.Semaphore(places)
        self._ahead = 0.0

    async def close(self) -> None:
        """End all connections."""
        await self._official.close()

    def now(self) -> float:
        """Unix seconds by the API server's clock, as of its last answer: what one replica writes into a status is
        compared with what another one's clock says, and that one may be wrong."""
        return time.time() + self._ahead

    def _compare_clocks(self, date: str | None) -> None:
        """From an answer's `Date`, which has whole seconds only, and is as old as the answer's way was long."""
        try:
            ahead = parsedate_to_datetime(date or "").timestamp() - time.time()
        except ValueError:
            return
        self._ahead = ahead if abs(ahead) > _CLOCKS_AGREE_SECONDS else 0.0

    async def get(self, resource: Resource[Item], namespace: str | None, name: str) -> Item:
        """Read one object."""
        return cast("Item", await self.request("GET", resource.path(namespace, name)))

    async def create(self, resource: Resource[Item], namespace: str, body: Manifest, *, strict: bool = False) -> Item:
        """Create one object; ApiError with reason `AlreadyExists` when it is there.

        Args:
            resource: its kind.
            namespace: its namespace.
            body: the object.
            strict: refuse fields that the kind does not have; else they are dropped.
        """
        params = {"fieldManager": FIELD_MANAGER, **({"fieldValidation": "Strict"} if strict else {})}
        return cast("Item", await self.request("POST", resource.path(namespace), params=params, body=body))

    async def apply(
        self, resource: Resource[Item], namespace: str, name: str, body: Manifest, subresource: str | None = None
    ) -> Item:
        """Server-side apply: the fields in `body` become ours, those that we sent before and not now are given up."""
        params = {"fieldManager": FIELD_MANAGER, "force": "true"}
        path = resource.path(namespace, name, subresource)
        return cast("Item", await self.request("PATCH", path, params=params, body=body, content_type=APPLY_PATCH))

    async def patch(self, resource: Resource[Item], namespace: str, name: str, operations: list[Json]) -> Item:
        """JSON patch (RFC 6902): all of it, or ApiError with code 422 where a test in it fails."""
        path = resource.path(namespace, name)
        params = {"fieldManager": FIELD_MANAGER}
        return cast("Item", await self.request("PATCH", path, params=params, body=operations, content_type=JSON_PATCH))

    async def delete(
        self, resource: Resource[Item], namespace: str, name: str, uid: str, *, wait: bool = False
    ) -> Item | None:
        """Delete the object with this UID, never another one of that name (ApiError with code 409).

        Args:
            resource: its kind.
            namespace: its namespace.
            name: its name.
            uid: its UID.
            wait: it stays until what it controls is gone; of an object that waits already False ends the wait.

        Returns:
            The object where it is still there, since something holds it; None: it is gone.
        """
        policy = "Foreground" if wait else "Background"
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": policy}
        answer = await self.request(
            "DELETE", resource.path(namespace, name), body={**body, "preconditions": {"uid": uid}}
        )
        return None if answer.get("kind") == "Status" else cast("Item", answer)

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Manifest | list[Json] | None = None,
        content_type: str = JSON,
        total_seconds: float | None = None,
    ) -> dict[str, Json]:
        """Send a request and return the answer's JSON.

        Raises:
            ApiError: refused, or not answered by the deadline.
        """
        until = time.monotonic() + (self._total_seconds if total_seconds is None else total_seconds)
        reconnected = False
        while True:
            left = min(self._try_seconds, until - time.monotonic())
            try:
                async with self._places:
                    text = await self._try(method, path, params, body, content_type, left)
                return _content(method, path, text)
            except ApiError as error:
                pause = _pause(error, reconnected)
                if pause is None or time.monotonic() + pause >= until:
                    raise
                reconnected = reconnected or error.code == 0
            await asyncio.sleep(pause)

    async def text(self, path: str, params: Mapping[str, str]) -> str:
        """Text of an answer that is no JSON: a container's log.

        Raises:
            ApiError: refused, or not answered by the deadline of one try.
        """
        return (await self._try("GET", path, params, None, JSON, self._try_seconds)).decode(errors="replace")

    async def _try(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        body: Manifest | list[Json] | None,
        kind: str,
        seconds: float,
    ) -> bytes:
        outcome, what = "disconnected", f"{method} {path}"
        try:
            async with asyncio.timeout(max(seconds, 0.001)):
                request = await self._official.param_serialize(
                    method,
                    path,
                    query_params=list((params or {}).items()),
                    header_params={"Accept": JSON, "Content-Type": kind},
                    body=_apply_text(body) if body is not None and kind == APPLY_PATCH else body,
                    auth_settings=["BearerToken"],
                )
                response = await self._official.call_api(*request, _request_timeout=aiohttp.ClientTimeout(total=None))
                outcome = str(response.status)
                self._compare_clocks(response.headers.get("Date"))
                content = bytes(await response.read())
        except TimeoutError:
            outcome = "timeout"
            raise ApiError(0, "NoAnswer", f"{what}: no answer within {seconds:.0f} s") from None
        except (aiohttp.ClientError, ConfigException, AccessProblem, OSError) as error:
            raise ApiError(0, "Disconnected", f"{what}: {error or type(error).__name__}") from None
        finally:
            self._metrics.requests.labels(method, outcome).inc()
        if response.status >= 300:
            raise refusal(what, response.status, response.reason, response.headers, content)
        return content


def _apply_text(body: Manifest | list[Json]) -> str:
    """JSON that is YAML as well: the API server's reader supports no pair of escapes for one character beyond
    U+FFFF, and takes no unprintable character that is not escaped."""
    text = json.dumps(body, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def refusal(what: str, code: int, reason: str | None, headers: Mapping[str, str], content: bytes) -> ApiError:
    """The error that a refusal means.

    Args:
        what: method and path, for the message.
        code: HTTP status.
        reason: HTTP's own words.
        headers: of the answer.
        content: a Status, or anything.
    """
    text = content.decode(errors="replace")
    try:
        status = json.loads(text)
        word, message = str(status.get("reason") or ""), str(status.get("message") or "")
    except (ValueError, AttributeError):
        word, message = "", text[:500]
    after = headers.get("Retry-After") or ""
    seconds = float(after) if after.isascii() and after.isdigit() else None
    return ApiError(code, word or reason or "", f"{what}: {code} {message or reason}", seconds)


def _pause(error: ApiError, reconnected: bool) -> float | None:
    if error.code == 429 or (error.code == 503 and error.retry_after is not None):
        return _PAUSE_SECONDS if error.retry_after is None else error.retry_after
    return 0.05 if error.reason == "Disconnected" and not reconnected else None


def _content(method: str, path: str, text: bytes) -> dict[str, Json]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ApiError(0, "NoAnswer", f"{method} {path}: the answer is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ApiError(0, "NoAnswer", f"{method} {path}: the answer is no object")
    return content
