"""Steps as OpenTelemetry spans: against the protocol's own messages, and endpoints that are slow, away or refuse."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from record_cases import bare
from support.clocks import at_once

from rljob_api.spec import OtlpSpec
from rljob_worker.records import otlp
from rljob_worker.records.otlp import HEADERS_VARIABLE, OtlpFeed, trace_request


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


SPAN_IDS = ("traceId", "spanId", "parentSpanId")


def strictly(content: Any) -> ExportTraceServiceRequest:
    """The protocol's message of a request in JSON, whose identifiers are hexadecimal (OTLP 1.x, "JSON Protobuf
    Encoding") where protobuf's own JSON has base64; a field that the message does not have is an error."""

    def as_protobuf(value: Any) -> Any:
        if isinstance(value, list):
            return [as_protobuf(one) for one in value]
        if not isinstance(value, dict):
            return value
        return {
            key: base64.b64encode(bytes.fromhex(inner)).decode() if key in SPAN_IDS else as_protobuf(inner)
            for key, inner in value.items()
        }

    return json_format.ParseDict(as_protobuf(content), ExportTraceServiceRequest())


@dataclass
class Collector:
    """Takes traces as the specification says: POST of JSON to /v1/traces, 200 with an ExportTraceServiceResponse."""

    url: str = ""
    status: int = 200
    answer: bytes = b"{}"
    held: threading.Event = field(default_factory=threading.Event)
    """Set: answers at once."""
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    collector.held.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.held.wait(60)
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/json"
            collector.headers.append(dict(self.headers))
            collector.requests.append(strictly(json.loads(body)))
            self.send_response(collector.status)
            self.send_header("Content-Length", str(len(collector.answer)))
            self.end_headers()
            self.wfile.write(collector.answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collector
    finally:
        collector.held.set()
        server.shutdown()
        server.server_close()


def record(step: int, **more: Any) -> Any:
    content = {
        "time": 1.7e9 + step,
        "phases": {"rollout": 0.5, "actor_train": 0.25},
        "metrics": {"rollout/raw_reward": 0.5, "train/loss": None},
        "ranks": {"trainer-0": {"actor_train": [[0.5, 0.75]]}},
    }
    return bare(step, **{**content, **more})


def feed_to(collector: Collector, **more: Any) -> OtlpFeed:
    return OtlpFeed(OtlpSpec(endpoint=collector.url, **more), "job", "here")


def test_a_step_is_one_trace_of_the_protocols_messages() -> None:
    request = strictly(trace_request(record(3, lanes={"engine": {"rollout": 1.0}}), {"service.name": "rljob"}, "here"))
    [resource] = request.resource_spans
    assert resource.resource.attributes[0].value.string_value == "rljob"
    root, *children = resource.scope_spans[0].spans
    assert root.name == "step 3"
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (1_700_000_002 * 10**9, 1_700_000_003 * 10**9)
    assert len(root.trace_id) == 16
    assert len(root.span_id) == 8
    assert not root.parent_span_id
    assert {span.trace_id for span in children} == {root.trace_id}
    assert {span.parent_span_id for span in children} == {root.span_id}
    assert len({span.span_id for span in [root, *children]}) == len(children) + 1
    lengths = {
        (span.name, next(a.value.string_value for a in span.attributes if a.key in ("rljob.lane", "rljob.process"))): (
            span.end_time_unix_nano - span.start_time_unix_nano
        )
        / 1e9
        for span in children
    }
    assert lengths == {
        ("rollout", "trainer"): pytest.approx(0.5),
        ("actor_train", "trainer"): pytest.approx(0.25),
        ("rollout", "engine"): pytest.approx(1.0),
        ("actor_train", "trainer-0"): pytest.approx(0.25),
    }
    values = {attribute.key: attribute.value for attribute in root.attributes}
    assert values["rollout/raw_reward"].double_value == 0.5
    assert values["rljob.step"].int_value == 3
    assert "train/loss" not in values, "was not measured"


def test_traces_of_steps_attempts_and_runs_differ() -> None:
    def trace(step: int, attempt: int, where: str) -> str:
        spans = trace_request(record(step, attempt=attempt), {}, where)["resourceSpans"][0]["scopeSpans"][0]["spans"]
        return str(spans[0]["traceId"])

    assert len({trace(1, 1, "a"), trace(2, 1, "a"), trace(1, 2, "a"), trace(1, 1, "b")}) == 4


def test_a_collector_gets_one_trace_a_step_with_the_headers_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEADERS_VARIABLE, "authorization=Bearer%20abc, x-team = rl")
    with collecting() as collector:
        feed = feed_to(collector)
        for step in range(1, 6):
            feed(record(step))
        delivery = feed.close(30.0)
        assert (delivery.offered, delivery.delivered, delivery.said()) == (5, 5, "")
        names = [request.resource_spans[0].scope_spans[0].spans[0].name for request in collector.requests]
        assert names == [f"step {step}" for step in range(1, 6)]
        assert {headers["Authorization"] for headers in collector.headers} == {"Bearer abc"}
        assert {headers["X-Team"] for headers in collector.headers} == {"rl"}


def test_an_endpoint_that_hangs_costs_nothing_and_what_it_lost_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_WAITING", 4)
    with collecting() as collector:
        collector.held.clear()
        feed = feed_to(collector, finishSeconds=0.1)
        with at_once():
            for step in range(1, 101):
                feed(record(step))
            delivery = feed.close(30.0)
        assert (delivery.offered, delivery.delivered) == (100, 0)
        assert delivery.dropped + delivery.failures == 100
        assert "100 of 100 steps were not delivered" in delivery.said()


def _away(collector: Collector) -> None:
    collector.url = "http://127.0.0.1:1"


def _refuses(collector: Collector) -> None:
    collector.status = 503


def _keeps_less(collector: Collector) -> None:
    collector.answer = b'{"partialSuccess": {"rejectedSpans": "2", "errorMessage": "too many"}}'


@pytest.mark.parametrize(
    ("break_it", "said"),
    [(_away, "Connection refused"), (_refuses, "503"), (_keeps_less, "2 spans rejected: too many")],
)
def test_what_an_endpoint_does_not_take_is_told(break_it: Callable[[Collector], None], said: str) -> None:
    with collecting() as collector:
        break_it(collector)
        feed = feed_to(collector)
        feed(record(1))
        deadline = time.monotonic() + 20
        while not feed.delivery.failures and time.monotonic() < deadline:
            time.sleep(0.01)
        delivery = feed.close(1.0)
    assert (delivery.offered, delivery.delivered, delivery.failures, delivery.dropped) == (1, 0, 1, 0)
    assert said in delivery.said()


def test_the_last_records_are_waited_for_and_no_longer_than_a_stop_leaves() -> None:
    with collecting() as collector:
        collector.held.clear()
        feed = feed_to(collector, finishSeconds=60.0)
        feed(record(1))
        with at_once():
            assert feed.close(0.05).delivered == 0
        feed = feed_to(collector, finishSeconds=60.0)
        feed(record(2))
        threading.Timer(0.1, collector.held.set).start()
        assert feed.close(60.0).said() == ""
