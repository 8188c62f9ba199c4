"""State of one of Kopf's watches: whether its kind was read whole, when the API server was last heard of."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rljob_operator.kubernetes_objects import Item, ObjectList
from rljob_operator.shell.api.metrics import OperatorMetrics
from rljob_operator.shell.api.resources import Resource
from rljob_operator.shell.caches.cache import Cache

logger = logging.getLogger(__name__)
Value = TypeVar("Value")
_EVER = 2**63
LONGEST_SHARE = 1.2
"""Pauses are scattered by a fifth, so that clients of the same server do not return together."""


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """Durations of a watch, in seconds."""

    server: float = 300.0
    """The API server is asked to end a watch after about this long."""
    inactivity: float = 100.0
    """A stream that was silent for longer is given up: the server sends a bookmark about once a minute."""
    first_pause: float = 0.5
    """Pause after a failure; doubles up to `longest_pause`."""
    longest_pause: float = 30.0


class Informer(Generic[Item, Value]):
    """One kind, in one namespace or in all: Kopf's handlers bring the objects of its lists, the transport the rest.

    Kopf tells handlers neither where a list ends nor what a new list no longer shows; the transport sees both. A list
    counts as read when every object in it came to the handler. It takes the place of what was known: what it did not
    show is forgotten, and what it shows counts even where something newer was known, if that came before it. (Then the
    cluster's state was put back, from a backup of etcd.)

    Args:
        resource: the kind.
        cache: what to feed; several informers (one a namespace) may feed one.
        metrics: where restarts are counted.
        selector: label selector; the server sends nothing else.
        namespace: None: all namespaces.
        times: limits of the watch.
        lost: called when the kind is not there (or not ours to see), where it need not be.
    """

    def __init__(
        self,
        resource: Resource[Item],
        cache: Cache[Item, Value],
        metrics: OperatorMetrics,
        *,
        selector: str | None = None,
        namespace: str | None = None,
        times: WatchTimes | None = None,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.resource = resource
        self.namespace = namespace
        self.selector = selector
        self.times = times or WatchTimes()
        self.synced = asyncio.Event()
        self.problem = ""
        """Why the last attempt failed; empty while the watch runs."""
        self.is_missing = False
        self.server_was_gone = False
        """Whether a watch could not be opened: the server that answers next may be one that was put back meanwhile."""
        self._cache = cache
        self._metrics = metrics
        self._lost = lost
        self._heard = time.monotonic()
        self._failures = 0
        self._newest = -1
        # The list that is being read: the versions of its objects, by UID, and those that did not come to the handler.
        self._shown: set[str] = set()
        self._awaited: dict[str, int] = {}
        self._list_version = -1
        self._read_whole = False
        for cause in ("ended", "expired"):  # Prometheus sees no increase in a series that begins at 1.
            metrics.watch_restarts.labels(str(resource), cause)

    def __str__(self) -> str:
        return f"{self.resource} in {self.namespace or 'all namespaces'}"

    @property
    def age(self) -> float:
        """Seconds since the API server was last heard of."""
        return time.monotonic() - self._heard

    @property
    def is_fresh(self) -> bool:
        """Whether the cache can be trusted: it was filled, and the server was heard of within twice the limit."""
        return self.synced.is_set() and self.age <= 2 * self.times.inactivity

    # --- what the transport tells -----------------------------------------------------------

    def heard(self) -> None:
        """The server sent something."""
        self._heard = time.monotonic()

    def opened(self) -> None:
        """The server agreed to a watch."""
        self.heard()
        self.is_missing = False
        self.problem = ""

    def listed(self, page: ObjectList[Item], is_first: bool) -> None:
        """A page of a list came.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is none.
        """
        version = int(page["metadata"]["resourceVersion"])
        if is_first:
            self._shown, self._awaited, self._read_whole = set(), {}, False
            self.server_was_gone = False
            # A list is as new as anything that was sent before it; an older one is of a cluster that was put back.
            restored = version < self._newest
            self._list_version, self._newest = (_EVER, version) if restored else (version, version)
            if restored:
                self.interrupted("restored")
                logger.warning("%s: resourceVersions went back to %d; everything is read anew", self, version)
        for item in page.get("items") or ():
            meta = item["metadata"]
            self._shown.add(str(meta["uid"]))
            self._awaited[str(meta["uid"])] = int(meta["resourceVersion"])
        self.heard()
        self._read_whole = not page["metadata"].get("continue")
        self._settle()

    def went_back(self, version: int) -> bool:
        """Whether this version, of an event or bookmark, is older than one that was sent before."""
        is_older = version < self._newest
        self._newest = max(version, self._newest)
        return is_older

    def has(self, item: Item) -> bool:
        """Whether the cache has this state of an object, or a newer one: it was the answer to a write of our own.

        While a list is taken in nothing is sure: versions may go back with it.
        """
        return not self._awaited and self._cache.has(item)

    def absent(self, problem: str) -> None:
        """The server does not know the kind, or does not let us see it."""
        self.is_missing = True
        self.interrupted("absent", problem)
        self._lost()

    def interrupted(self, cause: str, problem: str = "") -> None:
        """A list or watch ended.

        Args:
            cause: one word, for the metrics.
            problem: for people; empty where this happens all the time.
        """
        self._metrics.watch_restarts.labels(str(self.resource), cause).inc()
        if problem and problem != self.problem:
            logger.warning("%s: %s", self, problem)
        self.problem = problem or self.problem

    async def pause(self, lasted: float) -> None:
        """Wait before the server is asked again: longer each time, unless it was well for a moment (`lasted`)."""
        self._failures = 0 if lasted > self.times.first_pause else min(self._failures + 1, 30)
        if self._failures:
            seconds = min(self.times.first_pause * 2.0 ** (self._failures - 1), self.times.longest_pause)
            await asyncio.sleep(seconds * random.uniform(2 - LONGEST_SHARE, LONGEST_SHARE))

    def takes(self, kind: str, item: Item) -> bool:
        """Take an event in without Kopf, which has a task, a queue and a batch for each object; whether that is done.

        Not while a list is taken in, which Kopf brings. After it the order does not matter: of two states, and of a
        state and a deletion, the cache keeps the newer one. What cannot be read is left to the handler, whose failures
        Kopf logs.
        """
        if self._awaited or not self.synced.is_set():
            return False
        try:
            self.take(kind, item)
        except Exception:
            return False
        return True

    # --- what the handlers bring ------------------------------------------------------------

    def take(self, kind: str | None, item: Item) -> None:
        """Take in an event.

        Args:
            kind: its type; None: from a list.
            item: the object.
        """
        meta = item["metadata"]
        uid, version = str(meta["uid"]), int(meta["resourceVersion"])
        try:
            if kind == "DELETED":
                self._cache.forget(str(meta.get("namespace", "")), meta["name"], uid, version)
            elif kind is None and self._awaited.get(uid) == version:
                self._cache.learn(item, listed=self._list_version)
            else:
                self._cache.learn(item)
        finally:
            if self._awaited.pop(uid, None) is not None:
                self._settle()

    def _settle(self) -> None:
        if not self._read_whole or self._awaited:
            return
        shown, self._shown, self._read_whole = self._shown, set(), False
        self._cache.keep_only(shown, self._list_version, self.namespace)
        self.problem = ""
        self.synced.set()
