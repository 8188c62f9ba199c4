"""The HTTP session that Kopf lists and watches with: signed and secured as the official client is, and listened to.

Kopf ends the whole operator on answers that it does not expect: 404 or 410 to a list or watch, an ERROR in the stream
other than 410, a line that is no JSON. Here they become what it recovers from: a lost connection (it tries again), or
410 in the stream (it lists again).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import aiohttp
from aiohttp import ClientHandlerType, ClientRequest, ClientResponse
from pydantic_core import from_json, to_json

from rljob_operator.shell.api.access import Access
from rljob_operator.shell.api.client import refusal
from rljob_operator.shell.api.metrics import OperatorMetrics
from rljob_operator.shell.api.resources import FIELD_MANAGER
from rljob_operator.shell.caches.informer import Informer

_LARGEST_EVENT = 2**24
_KOPF_TRIES_AGAIN = (401, 403, 429)
_LIST_AGAIN = b'{"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "list again"}}\n'


class _Unfit(Exception):
    """A line of a watch that Kopf must not see: a word why, and a text for people."""


def kopf_session(
    access: Access, metrics: OperatorMetrics, informer_at: Callable[[str], Informer | None]
) -> aiohttp.ClientSession:
    """A session for `kopf.AiohttpSession`.

    Args:
        access: the server and the credentials.
        metrics: where requests are counted.
        informer_at: the one whose kind is listed and watched at a path.
    """

    async def through(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        informer = informer_at(request.url.path)
        try:
            token = await access.configuration.get_api_key_with_prefix("BearerToken")
            if token:
                request.headers["Authorization"] = token
            response = await handler(request)
        except Exception as error:
            metrics.requests.labels(request.method, "disconnected").inc()
            if informer is not None:
                informer.server_was_gone = True
                informer.interrupted(type(error).__name__, f"{informer}: {error or type(error).__name__}")
            if isinstance(error, (aiohttp.ClientError, TimeoutError, OSError)):
                raise
            raise aiohttp.ClientConnectionError(str(error)) from None  # the token cannot be read (now)
        metrics.requests.labels(request.method, str(response.status)).inc()
        if informer is None:
            return response
        if response.status >= 400:
            return await _refused(informer, request, response)
        if "watch" in request.url.query:
            lines = _list_again(informer) if informer.server_was_gone else _events(informer, response.content)
            informer.opened()
            response.content = _Lines(response.content, lines)  # type: ignore[assignment]
        else:
            await _listed(informer, request, response)
        return response

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=access.tls, keepalive_timeout=60),
        headers={"User-Agent": FIELD_MANAGER, "Accept": "application/json"},
        cookie_jar=aiohttp.DummyCookieJar(),
        middlewares=(through,),
        read_bufsize=2**18,
        proxy=access.configuration.proxy,
    )


async def _listed(informer: Informer, request: ClientRequest, response: ClientResponse) -> None:
    try:
        page = from_json(await response.read())
        informer.listed(page, is_first="continue" not in request.url.query)
        for item in page.get("items") or ():
            informer.resource.drop_unread(item)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"{informer}: the server's list cannot be read: {error!r}"
        informer.interrupted("unreadable", problem)
        raise aiohttp.ClientConnectionError(problem) from None

    async def parsed(**_: object) -> Any:
        return page

    response.json = parsed  # type: ignore[method-assign]


async def _refused(informer: Informer, request: ClientRequest, response: ClientResponse) -> ClientResponse:
    is_watch, code = "watch" in request.url.query, response.status
    error = refusal(f"GET {request.url.path}", code, response.reason, response.headers, await response.read())
    if code == 410 or (is_watch and code == 504 and "resource version" in str(error).lower()):
        # Forgotten by the server, or not yet reached: it was put back to before this version.
        informer.interrupted("expired")
        if is_watch:
            response.content = _Lines(response.content, _list_again(informer))  # type: ignore[assignment]
            response.status = 200
            return response
        await informer.pause(0.0)
        raise aiohttp.ClientPayloadError(str(error))  # Kopf begins the list anew.
    if code == 404:
        informer.absent(f"the API server does not know {informer.resource}; is its CRD installed?")
    elif code == 403:
        informer.absent(f"the operator may not list and watch {informer.resource}: {error}")
    else:
        informer.server_was_gone |= code >= 500
        informer.interrupted(str(code), f"{informer}: {error}")
    if code in _KOPF_TRIES_AGAIN or code >= 500:
        return response
    raise aiohttp.ClientConnectionError(str(error))


class _Lines:
    """The body of a watch as Kopf reads it; for the rest, what `aiohttp` made of it."""

    def __init__(self, reader: aiohttp.StreamReader, lines: AsyncIterator[bytes]) -> None:
        self._reader = reader
        self._lines = lines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def iter_chunked(self, _: int) -> AsyncIterator[bytes]:
        return self._lines


async def _list_again(informer: Informer) -> AsyncIterator[bytes]:
    await informer.pause(0.0)
    yield _LIST_AGAIN


async def _events(informer: Informer, reader: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a watch as they come, to the first that Kopf must not see: there Kopf has to list again."""
    began, rest, cause, problem = time.monotonic(), b"", "", ""
    try:
        while not cause:
            async with asyncio.timeout(informer.times.inactivity):
                chunk = await reader.readany()
            informer.heard()
            *lines, rest = (rest + chunk).split(b"\n")
            for event in _for_kopf(informer, filter(None, lines)):
                yield event
            if not chunk:
                cause = "ended"
            elif len(rest) > _LARGEST_EVENT:
                cause, problem = "unreadable", f"{informer}: an event of more than {_LARGEST_EVENT} bytes"
    except _Unfit as unfit:
        cause, problem = unfit.args
    except TimeoutError:
        # A server that was put back to before this version sends nothing until it has reached it again.
        cause = "silent"
    except (aiohttp.ClientError, OSError) as error:
        cause = type(error).__name__
        await informer.pause(time.monotonic() - began)
        raise
    finally:
        informer.interrupted(cause or "closed", problem)
    await informer.pause(time.monotonic() - began)
    if cause != "ended":
        yield _LIST_AGAIN


def _for_kopf(informer: Informer, lines: Iterable[bytes]) -> Iterator[bytes]:
    """Lines for Kopf: of what the cache has, or takes in here, the version alone, from which its watch goes on.

    Raises:
        _Unfit: there is a line that Kopf must not see; it has those before.
    """
    passed: str | None = None
    for line in lines:
        kind, item = _event(informer, line)
        if kind in ("ADDED", "MODIFIED") and informer.has(item):
            kind = "BOOKMARK"
        if kind != "BOOKMARK":
            informer.resource.drop_unread(item)
        if kind == "BOOKMARK" or informer.takes(kind, item):
            passed = item["metadata"]["resourceVersion"]
            continue
        passed = None
        yield _line(kind, item)
    if passed is not None:
        yield _line("BOOKMARK", {"metadata": {"resourceVersion": passed}})


def _line(kind: str, item: Any) -> bytes:
    return to_json({"type": kind, "object": item}) + b"\n"


def _event(informer: Informer, line: bytes) -> tuple[str, Any]:
    """Type and object of a line.

    Raises:
        _Unfit: Kopf must not see it.
    """
    try:
        event = from_json(line)
        kind, item = event["type"], event["object"]
        if kind == "ERROR" and item.get("code") == 410:
            raise _Unfit("expired", "")
        if kind == "ERROR":
            raise _Unfit("error", f"{informer}: watch: {item}"[:500])
        version = int(item["metadata"]["resourceVersion"])
        if kind in ("ADDED", "MODIFIED", "DELETED"):
            item["metadata"]["uid"], item["metadata"]["name"]
        elif kind != "BOOKMARK":
            raise ValueError(f"an event of type {kind!r}")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _Unfit("unreadable", f"{informer}: the server's answer cannot be read: {error!r}") from None
    if informer.went_back(version):
        raise _Unfit("expired", "")
    return kind, item
