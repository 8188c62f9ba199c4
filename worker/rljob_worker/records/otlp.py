"""Steps as OpenTelemetry spans, by OTLP over HTTP with JSON: one trace a step, sent beside the run."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from rljob_api import metrics as m
from rljob_api.how_many import how_many
from rljob_api.phases import TRAINER_LANE
from rljob_api.spec import OtlpSpec
from rljob_api.wire.step_record import StepRecord

logger = logging.getLogger(__name__)
HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
"""Headers of each request, as OpenTelemetry's own exporters read them: `name=value,name=value`, percent-encoded."""
PATH = "/v1/traces"
_WAITING = 256
"""Records that wait for an endpoint that is slow or away; later ones are dropped, and counted."""
_ANSWER_BYTES = 65536
_INTERNAL = 1
"""`SPAN_KIND_INTERNAL`."""
_ATTRIBUTES = (m.REWARD_KEY, m.RESPONSE_LENGTH_KEY, "train/loss", "train/grad_norm", m.LOGPROB_KEY)
Json = dict[str, Any]


@dataclass(slots=True)
class SpanDelivery:
    """Delivery of the steps' traces."""

    offered: int = 0
    delivered: int = 0
    failures: int = 0
    """Refused, or not answered in time."""
    dropped: int = 0
    """Found no room in the queue, or were left when the run ended."""
    first_failure: str = ""

    def said(self) -> str:
        """One sentence; empty when all is well."""
        missing = self.offered - self.delivered
        if not missing:
            return ""
        why = f": {self.first_failure}" if self.first_failure else ""
        numbers = f"{self.failures} refused or unanswered, {self.dropped} dropped"
        return f"records.otlp: {missing} of {self.offered} steps were not delivered ({numbers}){why}"


class OtlpFeed:
    """Sends each step's record as spans; nothing here waits, but `close`.

    Args:
        spec: where to.
        run: name of the job.
        where: what tells this run from others of the name.
    """

    def __init__(self, spec: OtlpSpec, run: str, where: str) -> None:
        self.delivery = SpanDelivery()
        self._spec = spec
        self._url = spec.endpoint.rstrip("/") + PATH
        self._headers = {"Content-Type": "application/json", **_headers(os.environ.get(HEADERS_VARIABLE, ""))}
        self._resource, self._where = {"service.name": "rljob", "rljob.job": run}, where
        self._queue: queue.Queue[StepRecord | None] = queue.Queue(_WAITING)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="otlp", daemon=True)
        self._thread.start()

    def __call__(self, record: StepRecord) -> None:
        """Hand a record over; returns at once."""
        self.delivery.offered += 1
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.delivery.dropped += 1

    def close(self, seconds: float) -> SpanDelivery:
        """Wait for what was handed over, at most so long and `finishSeconds`; says what is missing."""
        if self._closed.is_set():
            return self.delivery
        deadline = time.monotonic() + max(0.0, min(seconds, self._spec.finish_seconds))
        while not self._queue.empty() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._closed.set()
        with suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        found = self.delivery
        found.dropped = found.offered - found.delivered - found.failures
        if found.said():
            logger.warning("%s", found.said())
        return found

    def _send_all(self) -> None:
        while not self._closed.is_set() and (record := self._queue.get()) is not None:
            try:
                self._send(record)
                self.delivery.delivered += 1
            except Exception as error:
                self.delivery.failures += 1
                if not self.delivery.first_failure:
                    self.delivery.first_failure = f"{self._url}: {error}"
                    logger.warning("records.otlp: %s: %s; training goes on", self._url, error)

    def _send(self, record: StepRecord) -> None:
        body = json.dumps(trace_request(record, self._resource, self._where), allow_nan=False).encode()
        request = urllib.request.Request(self._url, body, self._headers, method="POST")
        with urllib.request.urlopen(request, timeout=self._spec.timeout_seconds) as answer:
            content = answer.read(_ANSWER_BYTES)
        rejected = _rejected(content)
        if rejected:
            raise ValueError(rejected)


def trace_request(record: StepRecord, resource: Mapping[str, str], where: str) -> Json:
    """An `ExportTraceServiceRequest` (opentelemetry-proto 1.x) in its JSON form: the step, its phases, its processes.

    Identifiers are hexadecimal and times are texts of nanoseconds, as the OTLP specification has them in JSON.

    Args:
        record: of the step.
        resource: attributes of the whole.
        where: what tells this run from others.
    """
    digest = hashlib.sha256(f"{where}\0{record.attempt}\0{record.step}\0{record.time!r}".encode()).hexdigest()
    spans = list(_spans(record, digest[:32], digest[32:48]))
    scopes = [{"scope": {"name": "rljob"}, "spans": spans}]
    return {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": scopes}]}


def _spans(record: StepRecord, trace: str, root: str) -> Iterator[Json]:
    begin = record.time - record.step_seconds
    name = f"step {record.step}" if record.is_step else "evaluation before step 1"
    values = {key: record.metrics[key] for key in _ATTRIBUTES if record.metrics.get(key) is not None}
    flags = {"rljob.rerun": record.rerun, "rljob.applied": record.applied}
    numbers = {"rljob.step": record.step, "rljob.attempt": record.attempt}
    yield _span(trace, root, "", name, (begin, record.time), {**numbers, **flags, **values})
    count = 0

    def child(name: str, edges: tuple[float, float], more: Mapping[str, object]) -> Json:
        nonlocal count
        count += 1
        own = hashlib.sha256(f"{root}{count}".encode()).hexdigest()[:16]
        return _span(trace, own, root, name, edges, {"rljob.step": record.step, **more})

    for lane, phases in {TRAINER_LANE: record.phases, **record.lanes}.items():
        at = begin
        for phase, seconds in phases.items():
            # A record has their lengths: they follow one another in its order.
            yield child(phase, (at, at + seconds), {"rljob.lane": lane, "rljob.begin_measured": False})
            at += seconds
    for process, phase, first, last in record.rank_spans():
        yield child(phase, (first, last), {"rljob.process": process, "rljob.begin_measured": True})


def _span(
    trace: str, own: str, parent: str, name: str, edges: tuple[float, float], attributes: Mapping[str, object]
) -> Json:
    span: Json = {
        "traceId": trace,
        "spanId": own,
        "name": name,
        "kind": _INTERNAL,
        "startTimeUnixNano": str(round(edges[0] * 1e9)),
        "endTimeUnixNano": str(round(edges[1] * 1e9)),
        "attributes": _attributes(attributes),
    }
    return {**span, "parentSpanId": parent} if parent else span


def _attributes(values: Mapping[str, object]) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: object) -> Json:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}


def _rejected(content: bytes) -> str:
    """Why the collector kept less than it was sent; empty where it kept all."""
    try:
        partial = json.loads(content or b"{}").get("partialSuccess") or {}
        count = int(partial.get("rejectedSpans") or 0)
    except (ValueError, AttributeError, TypeError):
        return ""
    return f"{how_many(count, 'span')} rejected: {str(partial.get('errorMessage', ''))[:200]}" if count else ""


def _headers(text: str) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in text.split(",") if "=" in pair)
    return {unquote(name.strip()): unquote(value.strip()) for name, _, value in pairs}
