"""Events: counted instead of repeated, a bounded number for each job, and no failure hinders anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fake_api import FakeApi, serving
from operator_cases import access_to, until
from prometheus_client import CollectorRegistry

from rljob_operator.shell.api.client import ApiClient
from rljob_operator.shell.api.events import EventRecorder
from rljob_operator.shell.api.metrics import OperatorMetrics
from rljob_operator.state.observed import JobView
from rljob_operator.state.plan import Event

JOB = JobView("default", "a" * 253, "u1", 1, 0.0, None)
OTHER = JobView("default", "b", "u2", 1, 0.0, None)


def play(test: Callable[[FakeApi, EventRecorder, OperatorMetrics], Awaitable[None]], **limits: Any) -> None:
    async def run() -> None:
        async with serving(FakeApi()) as api:
            metrics = OperatorMetrics(CollectorRegistry())
            client = ApiClient(access_to(api.url).configuration, metrics)
            recorder = EventRecorder(client, metrics, "one", **limits)
            sending = asyncio.create_task(recorder.run())
            await test(api, recorder, metrics)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            await client.close()

    asyncio.run(run())


def dropped(metrics: OperatorMetrics, cause: str) -> float:
    return metrics.events_dropped.labels(cause)._value.get()


def test_the_same_event_is_counted_up() -> None:
    async def test(api: FakeApi, recorder: EventRecorder, metrics: OperatorMetrics) -> None:
        for _ in range(5):
            recorder.record(JOB, Event("Warning", "Again", "x" * 5000))
        await recorder.drain(2)
        (event,) = api.objects["events"].values()
        assert event["count"] == 1
        assert len(event["message"]) == 1024
        recorder._repeat_seconds = 0.0
        recorder.record(JOB, Event("Warning", "Again", "x" * 5000))
        await recorder.drain(2)
        (event,) = api.objects["events"].values()
        assert event["count"] == 6
        await api.remove("events", event["metadata"]["name"])
        recorder.record(JOB, Event("Warning", "Again", "x" * 5000))
        await recorder.drain(2)
        assert len(api.objects["events"]) == 1

    play(test)


def test_one_job_cannot_flood() -> None:
    async def test(api: FakeApi, recorder: EventRecorder, metrics: OperatorMetrics) -> None:
        for number in range(20):
            recorder.record(JOB, Event("Normal", "Many", str(number)))
        recorder.record(OTHER, Event("Normal", "One", "mine"))
        await recorder.drain(2)
        reasons = [event["reason"] for event in api.objects["events"].values()]
        assert (reasons.count("Many"), reasons.count("One")) == (5, 1)
        assert dropped(metrics, "rate") == 15

    play(test, burst=5, refill_seconds=3600.0)


def test_events_are_sent_no_faster_than_they_may_be() -> None:
    async def test(api: FakeApi, recorder: EventRecorder, metrics: OperatorMetrics) -> None:
        began = time.monotonic()
        for number in range(3):
            recorder.record(JOB, Event("Normal", "Slow", str(number)))
            recorder.record(JOB, Event("Normal", "Slow", str(number)))
        await until(lambda: len(api.objects.get("events", {})) == 3)
        assert time.monotonic() - began >= 1.6

    play(test, per_second=5.0)


def test_events_at_the_end_do_not_wait_for_their_turn() -> None:
    async def test(api: FakeApi, recorder: EventRecorder, metrics: OperatorMetrics) -> None:
        recorder.record(JOB, Event("Normal", "First", ""))
        await until(lambda: bool(api.objects.get("events")))
        for number in range(60):
            recorder.record(JOB, Event("Normal", "Last", str(number)))
        await recorder.drain(30)
        assert len(api.objects["events"]) == 61

    # One in a second: in turn they would need longer than they are given.
    play(test, burst=100, per_second=4.0)


def test_a_full_backlog_drops_and_says_so() -> None:
    async def test(api: FakeApi, recorder: EventRecorder, metrics: OperatorMetrics) -> None:
        for number in range(10):
            recorder.record(JOB, Event("Normal", "Many", str(number)))
        assert dropped(metrics, "queue") == 7
        await recorder.drain(2)

    play(test, backlog=3)


def test_an_event_that_is_refused_does_not_stop_the_next() -> None:
    async def test(api: FakeApi, recorder: EventRecorder, metrics: OperatorMetrics) -> None:
        api.fail("POST", "/events", code=403)
        recorder.record(JOB, Event("Normal", "First", "refused"))
        recorder.record(JOB, Event("Normal", "Second", "sent"))
        await until(lambda: len(api.objects.get("events", {})) == 1)
        assert dropped(metrics, "error") == 1

    play(test)
