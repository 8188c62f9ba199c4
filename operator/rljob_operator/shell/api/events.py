"""Kubernetes Events about jobs: the same one is counted instead of repeated, and no job can flood the API server."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime

from rljob_api.job import GROUP, KIND, VERSION
from rljob_operator.kubernetes_objects import Manifest
from rljob_operator.shell.api.client import MERGE_PATCH, ApiClient, ApiError
from rljob_operator.shell.api.metrics import OperatorMetrics
from rljob_operator.shell.api.resources import EVENTS
from rljob_operator.state.observed import JobView
from rljob_operator.state.plan import Event

logger = logging.getLogger(__name__)
_MESSAGE = 1024
_REASON = 128
_REMEMBERED = 4096
_SENDERS = 4


@dataclass(slots=True)
class _Sent:
    name: str
    first: str
    count: int
    written: float


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float


class EventRecorder:
    """Queues Events and sends those of a job one after the other; a failure to send hinders nothing else.

    Args:
        client: the API server.
        metrics: where dropped Events are counted.
        identity: of this replica.
        burst: Events of one job at once; then one in `refill_seconds`.
        refill_seconds: see `burst`.
        repeat_seconds: an Event that was sent already is written again (with its count) no sooner than this.
        backlog: Events that wait at most, in each of four lines.
        per_second: Events sent in a second, all together: nothing waits for them, and a write of something that counts
            may wait behind them.
    """

    def __init__(
        self,
        client: ApiClient,
        metrics: OperatorMetrics,
        identity: str,
        burst: int = 25,
        refill_seconds: float = 30.0,
        repeat_seconds: float = 60.0,
        backlog: int = 1000,
        per_second: float = 10.0,
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._identity = identity
        self._burst = burst
        self._refill_seconds = refill_seconds
        self._repeat_seconds = repeat_seconds
        self._pause = _SENDERS / per_second
        self._lines: list[asyncio.Queue[tuple[JobView, Event, str]]] = [asyncio.Queue(backlog) for _ in range(_SENDERS)]
        self._sent: OrderedDict[tuple[str, Event], _Sent] = OrderedDict()
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def record(self, job: JobView, event: Event) -> None:
        """Have an Event sent."""
        try:
            self._lines[hash(job.uid) % _SENDERS].put_nowait((job, event, _now()))
        except asyncio.QueueFull:
            self._metrics.events_dropped.labels("queue").inc()

    async def run(self) -> None:
        """Send what is recorded, for good."""
        async with asyncio.TaskGroup() as senders:
            for line in self._lines:
                senders.create_task(self._send_all(line))

    async def _send_all(self, line: asyncio.Queue[tuple[JobView, Event, str]]) -> None:
        while True:
            job, event, at = await line.get()
            asked = True
            try:
                asked = await self._send(job, event, at)
            except ApiError as error:
                self._metrics.events_dropped.labels("error").inc()
                logger.warning("%s/%s: the event %s was not sent: %s", job.namespace, job.name, event.reason, error)
            finally:
                line.task_done()
            if asked:
                await asyncio.sleep(self._pause)

    async def drain(self, seconds: float) -> None:
        """Send everything recorded as fast as it goes, at most so long; `run` must be running."""
        self._pause = 0.0
        try:
            async with asyncio.timeout(seconds):
                for line in self._lines:
                    await line.join()
        except TimeoutError:
            logger.warning("%d events were not sent in time", sum(line.qsize() for line in self._lines))

    async def _send(self, job: JobView, event: Event, at: str) -> bool:
        """Write an Event, or count it up; tells whether the API server was asked."""
        key, now = (job.uid, event), time.monotonic()
        sent = self._sent.get(key)
        if sent is not None:
            self._sent.move_to_end(key)
            sent.count += 1
            if now - sent.written < self._repeat_seconds or not self._allowed(job.uid, now):
                return False
            sent.written = now
            if await self._count_up(job, sent, at):
                return True
        elif not self._allowed(job.uid, now):
            self._metrics.events_dropped.labels("rate").inc()
            return False
        made = await self._client.create(EVENTS, job.namespace, _event(job, event, at, self._identity))
        self._sent[key] = _Sent(made["metadata"]["name"], at, 1, now)
        while len(self._sent) > _REMEMBERED:
            self._sent.popitem(last=False)
        return True

    async def _count_up(self, job: JobView, sent: _Sent, at: str) -> bool:
        body: Manifest = {"count": sent.count, "lastTimestamp": at}
        try:
            path = EVENTS.path(job.namespace, sent.name)
            await self._client.request("PATCH", path, body=body, content_type=MERGE_PATCH)
        except ApiError as error:
            if error.code != 404:
                raise
            return False  # Kubernetes deletes Events after an hour.
        return True

    def _allowed(self, uid: str, now: float) -> bool:
        bucket = self._buckets.setdefault(uid, _Bucket(self._burst, now))
        self._buckets.move_to_end(uid)
        while len(self._buckets) > _REMEMBERED:
            self._buckets.popitem(last=False)
        bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.at) / self._refill_seconds)
        bucket.at = now
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True


def _event(job: JobView, event: Event, at: str, identity: str) -> Manifest:
    mark = hashlib.sha256(f"{job.uid} {event} {time.time_ns()}".encode()).hexdigest()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        # The name of an object may have 253 characters.
        "metadata": {"name": f"{job.name[:230]}.{mark}", "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "namespace": job.namespace,
            "name": job.name,
            "uid": job.uid,
        },
        "type": event.type,
        "reason": event.reason[:_REASON],
        "message": event.message if len(event.message) <= _MESSAGE else event.message[: _MESSAGE - 1] + "…",
        "count": 1,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "source": {"component": "rljob-operator"},
        "reportingComponent": "rljob-operator",
        "reportingInstance": identity,
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
