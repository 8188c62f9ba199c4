"""List and watch against a server that drops, forgets, refuses and falls silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_api import FakeApi, serving
from prometheus_client import CollectorRegistry

from rljob_operator.shell.cache import Cache
from rljob_operator.shell.connection import Connection
from rljob_operator.shell.metrics import OperatorMetrics
from rljob_operator.shell.reflector import Reflector, WatchTimes
from rljob_operator.shell.resources import Resource
from rljob_operator.shell.rest import ApiClient
from rljob_operator.shell.views import own_key

THINGS = Resource("x.dev", "v1", "things")
FAST = WatchTimes(server=30.0, inactivity=0.5, first_pause=0.02, longest_pause=0.1)


class Watched:
    def __init__(self, api: FakeApi, cache: Cache[str], reflector: Reflector, metrics: OperatorMetrics) -> None:
        self.api = api
        self.cache = cache
        self.reflector = reflector
        self.metrics = metrics

    def names(self) -> set[str]:
        return {key.name for key in self.cache.jobs()}

    async def sees(self, *names: str) -> None:
        await until(lambda: self.names() == set(names), lambda: f"{self.names()} {self.reflector.problem}")

    def restarts(self, cause: str) -> float:
        return self.metrics.watch_restarts.labels("things.x.dev", cause)._value.get()


async def until(holds: Callable[[], bool], says: Callable[[], str] = str, seconds: float = 5.0) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not holds():
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"not within {seconds} s: {says()}")


@asynccontextmanager
async def watching(names: str = "", **options: Any) -> AsyncIterator[Watched]:
    async with serving(FakeApi()) as api:
        for name in names:
            await api.put("things", thing(name))
        metrics = OperatorMetrics(CollectorRegistry())
        client = ApiClient(Connection(api.url, None, lambda: None), metrics, try_seconds=1.0, total_seconds=2.0)
        cache: Cache[str] = Cache(own_key, lambda item: item.get("value", ""), lambda job: None)
        reflector = Reflector(client, THINGS, cache, metrics, times=options.pop("times", FAST), **options)
        task = asyncio.create_task(reflector.run())
        try:
            yield Watched(api, cache, reflector, metrics)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.close()


def thing(name: str, value: str = "", **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": labels}, "value": value}


def test_a_list_is_read_in_pages_and_a_watch_follows() -> None:
    async def run() -> None:
        async with watching("abcdefg", page=3) as seen:
            await seen.sees(*"abcdefg")
            assert seen.api.count("GET", "limit=3") == 3
            await seen.api.put("things", thing("h"))
            await seen.api.remove("things", "a")
            await seen.sees(*"bcdefgh")
            assert seen.reflector.young

    asyncio.run(run())


def test_only_selected_objects_are_asked_for() -> None:
    async def run() -> None:
        async with watching(selector="mine") as seen:
            await seen.api.put("things", thing("a", mine="1"))
            await seen.api.put("things", thing("b"))
            await seen.sees("a")
            await seen.api.put("things", thing("a"))
            await seen.sees()
            await seen.api.put("things", thing("a", mine="1"))
            await seen.sees("a")

    asyncio.run(run())


def test_a_dropped_watch_goes_on_where_it_was() -> None:
    async def run() -> None:
        async with watching("a") as seen:
            await seen.sees("a")
            lists = seen.api.count("GET", "limit")
            for name in "bcd":
                await seen.api.drop_watches()
                await seen.api.put("things", thing(name))
            await seen.sees(*"abcd")
            assert seen.api.count("GET", "limit") == lists

    asyncio.run(run())


def test_410_in_the_stream_or_at_its_start_reads_the_list_again() -> None:
    async def run() -> None:
        async with watching("ab") as seen:
            await seen.sees("a", "b")
            seen.api.silent = True
            await seen.api.remove("things", "a")
            await seen.api.put("things", thing("c"))
            seen.api.compact()
            seen.api.silent = False
            await seen.sees("b", "c")
            seen.api.fail("GET", "things", watch=True, code=410)
            await seen.api.drop_watches()
            await seen.api.put("things", thing("d"))
            await seen.sees("b", "c", "d")
            assert seen.restarts("expired") >= 1

    asyncio.run(run())


def test_410_between_two_pages_begins_the_list_anew() -> None:
    async def run() -> None:
        async with serving(FakeApi()) as api:
            for name in "abcd":
                await api.put("things", thing(name))
            metrics = OperatorMetrics(CollectorRegistry())
            client = ApiClient(Connection(api.url, None, lambda: None), metrics)
            cache: Cache[str] = Cache(own_key, lambda item: "", lambda job: None)
            api.faults.append(api.fail("GET", "things", code=410))
            api.faults[-1].hits = lambda request: "continue" in request.query
            reflector = Reflector(client, THINGS, cache, metrics, times=FAST, page=2)
            task = asyncio.create_task(reflector.run())
            await until(reflector.synced.is_set)
            assert len(cache) == 4
            assert api.count("GET", "continue") == 2
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.close()

    asyncio.run(run())


@pytest.mark.parametrize("fault", [{"code": 500}, {"code": 429, "headers": {"Retry-After": "0"}}, {"drop": True}])
@pytest.mark.parametrize("watch", [True, False])
def test_errors_are_tried_again(fault: dict[str, Any], watch: bool) -> None:
    async def run() -> None:
        async with watching("a") as seen:
            seen.api.fail("GET", "things", watch=watch, times=3, **fault)
            seen.api.compact()
            await seen.api.drop_watches()
            await seen.api.put("things", thing("b"))
            await seen.sees("a", "b")

    asyncio.run(run())


def test_429_waits_as_long_as_the_server_asks() -> None:
    async def run() -> None:
        async with serving(FakeApi()) as api:
            api.fail("GET", "things", watch=False, code=429, headers={"Retry-After": "1"})
            metrics = OperatorMetrics(CollectorRegistry())
            client = ApiClient(Connection(api.url, None, lambda: None), metrics)
            began = asyncio.get_running_loop().time()
            await client.request("GET", "/apis/x.dev/v1/things")
            assert asyncio.get_running_loop().time() - began >= 1.0
            assert metrics.requests.labels("GET", "429")._value.get() == 1
            await client.close()

    asyncio.run(run())


def test_a_silent_stream_is_given_up_and_looks_old_meanwhile() -> None:
    async def run() -> None:
        times = WatchTimes(server=30.0, inactivity=0.2, first_pause=0.02, longest_pause=0.1)
        async with watching("a", times=times) as seen:
            await until(lambda: seen.api.open_watches == 1)
            seen.api.silent = True
            seen.api.fail("GET", "things", times=10**6, delay=30.0)
            await until(lambda: not seen.reflector.young and seen.reflector.age > 0.4)
            seen.api.silent = False
            seen.api.faults.clear()
            await seen.api.put("things", thing("b"))
            await seen.sees("a", "b")
            assert seen.restarts("TimeoutError") >= 1
            await until(lambda: seen.reflector.young)

    asyncio.run(run())


def test_a_kind_that_is_not_there_ends_an_optional_watch_and_names_the_crd_otherwise() -> None:
    async def run() -> None:
        async with serving(FakeApi()) as api:
            api.absent.add("things")
            metrics = OperatorMetrics(CollectorRegistry())
            client = ApiClient(Connection(api.url, None, lambda: None), metrics)
            cache: Cache[str] = Cache(own_key, lambda item: "", lambda job: None)
            optional = Reflector(client, THINGS, cache, metrics, times=FAST, optional=True)
            await asyncio.wait_for(optional.run(), 2)
            needed = Reflector(client, THINGS, cache, metrics, times=FAST)
            task = asyncio.create_task(needed.run())
            await until(lambda: "does not know things.x.dev; is its CRD installed" in needed.problem)
            assert not needed.young
            api.absent.clear()
            await until(lambda: needed.young)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "rubbish",
    [
        b"no JSON\n",
        b"[]\n",
        b'{"type": "STRANGE", "object": {"metadata": {"resourceVersion": "11"}}}\n',
        b'{"type": "ADDED", "object": {"metadata": {}}}\n',
        b'{"type": "ADDED", "object": {"metadata": {"name": "z", "uid": "z", "resourceVersion": "abc"}}}\n',
    ],
)
def test_rubbish_in_the_stream_reads_the_list_again(rubbish: bytes) -> None:
    async def run() -> None:
        async with watching("a") as seen:
            await seen.sees("a")
            lists = seen.api.count("GET", "limit")
            seen.api.rubbish = rubbish
            await until(lambda: seen.restarts("unreadable") == 1)
            await seen.api.put("things", thing("b"))
            await seen.sees("a", "b")
            assert seen.api.count("GET", "limit") == lists + 1

    asyncio.run(run())


def test_an_event_may_come_in_many_pieces() -> None:
    async def run() -> None:
        async with watching("a") as seen:
            await seen.sees("a")
            await seen.api.put("things", thing("b", "ä" * 700_000))
            await seen.sees("a", "b")
            assert seen.cache.get("default", "b") == "ä" * 700_000

    asyncio.run(run())
