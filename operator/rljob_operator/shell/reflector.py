"""List and watch: keeps a cache equal to what the API server has."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from rljob_operator.shell.cache import Cache
from rljob_operator.shell.metrics import OperatorMetrics
from rljob_operator.shell.resources import Resource
from rljob_operator.shell.rest import ApiClient, ApiError

logger = logging.getLogger(__name__)
_LARGEST_EVENT = 2**24
_GONE = 410


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """How long a watch may take, in seconds."""

    server: float = 300.0
    """The API server is asked to end a watch after about this long."""
    inactivity: float = 100.0
    """A stream that was silent for longer is given up: the server sends a bookmark about once a minute."""
    first_pause: float = 0.5
    """Pause after a failure; doubles up to `longest_pause`."""
    longest_pause: float = 30.0


class Expired(Exception):
    """The API server no longer has the resourceVersion that was asked for: the list must be read again."""


class Absent(Exception):
    """The API server does not know the kind, or does not let us see it."""


class Reflector:
    """Keeps `cache` equal to one kind of objects, of one namespace or of all.

    Args:
        client: the API server.
        resource: the kind.
        cache: what to feed; several reflectors (one a namespace) may feed one.
        metrics: where restarts are counted.
        selector: label selector; the server sends nothing else.
        namespace: None: all namespaces.
        times: limits of the watch.
        page: objects in one answer to a list, which bounds the memory that a list takes.
        optional: return instead of trying again when the kind is not there (or not ours to see).
    """

    def __init__(
        self,
        client: ApiClient,
        resource: Resource,
        cache: Cache[Any],
        metrics: OperatorMetrics,
        *,
        selector: str | None = None,
        namespace: str | None = None,
        times: WatchTimes | None = None,
        page: int = 100,
        optional: bool = False,
    ) -> None:
        self.resource = resource
        self.namespace = namespace
        self.synced = asyncio.Event()
        self.problem = ""
        """Why the last attempt failed; empty while the watch runs."""
        self._client = client
        self._cache = cache
        self._metrics = metrics
        for cause in ("ended", "expired"):  # Prometheus sees no increase in a series that begins at 1.
            metrics.watch_restarts.labels(str(resource), cause)
        self._selector = {} if selector is None else {"labelSelector": selector}
        self._times = times or WatchTimes()
        self._page = page
        self._optional = optional
        self._version = ""
        self._heard = time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since the API server was last heard of."""
        return time.monotonic() - self._heard

    @property
    def young(self) -> bool:
        """Whether the cache can be trusted: it was filled, and the server was heard of within twice the limit."""
        return self.synced.is_set() and self.age <= 2 * self._times.inactivity

    async def run(self) -> None:
        """List, then watch, for good; returns only where the kind is optional and not there."""
        pause = 0.0
        while True:
            try:
                if not self._version:
                    await self._list()
                began = time.monotonic()
                await self._watch()
                # A server that ends each watch at once is not asked without a pause.
                if time.monotonic() - began > self._times.first_pause:
                    pause = 0.0
                    continue
                cause = "ended"
            except Expired as error:
                self._version, cause = "", "expired"
                logger.info("%s: the list is read again: %s", self._name, error)
            except Absent as error:
                self.problem = str(error)
                if self._optional:
                    return
                self._version, cause = "", "absent"
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
                cause = str(error.code or error.reason) if isinstance(error, ApiError) else type(error).__name__
                self.problem = f"{self._name}: {error or cause}"
                retry_after = error.retry_after if isinstance(error, ApiError) else None
                pause = max(pause, retry_after or 0.0)
            except (KeyError, TypeError, ValueError) as error:
                # An answer that is none of Kubernetes': nothing after it can be trusted.
                self._version, cause = "", "unreadable"
                self.problem = f"{self._name}: the server's answer cannot be read: {error!r}"
            self._metrics.watch_restarts.labels(str(self.resource), cause).inc()
            if self.problem:
                logger.warning("watch ended, opened again: %s", self.problem)
            pause = min(max(2 * pause, self._times.first_pause), max(self._times.longest_pause, pause))
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))

    @property
    def _name(self) -> str:
        return f"{self.resource} in {self.namespace or 'all namespaces'}"

    async def _list(self) -> None:
        path, seen, token = self.resource.path(self.namespace), [], ""
        while True:
            params = {**self._selector, "limit": str(self._page), **({"continue": token} if token else {})}
            answer = await self._asked(self._client.request("GET", path, params=params))
            for item in answer.get("items") or ():
                self._cache.learn(item)
                seen.append(item["metadata"]["uid"])
            self._heard = time.monotonic()
            token = answer["metadata"].get("continue") or ""
            if not token:
                break
        self._version = str(answer["metadata"]["resourceVersion"])
        self._cache.keep_only(seen, int(self._version), self.namespace)
        self.problem = ""
        self.synced.set()

    async def _asked(self, request: Any) -> Any:
        try:
            return await request
        except ApiError as error:
            raise self._sorted(error) from None

    def _sorted(self, error: ApiError) -> Exception:
        if error.code == _GONE:
            return Expired(str(error))
        if error.code == 404:
            return Absent(f"the API server does not know {self.resource}; is its CRD installed?")
        if error.code == 403:
            return Absent(f"the operator may not list and watch {self.resource}: {error}")
        return error

    async def _watch(self) -> None:
        seconds = random.uniform(0.8, 1.2) * self._times.server
        params = {
            **self._selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(max(1, round(seconds))),
        }
        try:
            async with self._client.watch(self.resource.path(self.namespace), params) as stream:
                self._heard = time.monotonic()
                async for event in self._events(stream):
                    self._take(event)
        except ApiError as error:
            raise self._sorted(error) from None
        self._heard = time.monotonic()
        self.problem = ""

    async def _events(self, stream: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
        rest = bytearray()
        while True:
            try:
                async with asyncio.timeout(self._times.inactivity):
                    chunk = await stream.readany()
            except TimeoutError:
                raise TimeoutError(f"the stream was silent for {self._times.inactivity:.0f} s") from None
            if not chunk:
                return
            self._heard = time.monotonic()
            rest += chunk
            if len(rest) > _LARGEST_EVENT:
                raise ValueError(f"an event of more than {_LARGEST_EVENT} bytes")
            if b"\n" in chunk:
                *lines, last = rest.split(b"\n")
                rest = last
                for line in lines:
                    if line.strip():
                        yield json.loads(line)

    def _take(self, event: dict[str, Any]) -> None:
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            code = int(item.get("code") or 0)
            message = str(item.get("message") or item)
            raise self._sorted(ApiError(code, str(item.get("reason") or ""), f"watch: {message}"))
        meta = item["metadata"]
        if kind == "DELETED":
            version = int(meta["resourceVersion"])
            self._cache.forget(str(meta.get("namespace", "")), meta["name"], str(meta["uid"]), version)
        elif kind in ("ADDED", "MODIFIED"):
            self._cache.learn(item)
        elif kind != "BOOKMARK":
            raise ValueError(f"an event of type {kind!r}")
        self._version = str(meta["resourceVersion"])
        self.problem = ""
