"""Kopf's watches against a server that drops, forgets, refuses, falls silent or is put back to an earlier state."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import kopf
import pytest
from fake_api import FakeApi, serving
from kopf._cogs.structs.references import Insights
from operator_cases import access_to, until
from prometheus_client import CollectorRegistry

from rljob_operator.shell.api.metrics import OperatorMetrics
from rljob_operator.shell.api.resources import Resource
from rljob_operator.shell.caches.cache import Cache
from rljob_operator.shell.caches.informer import Informer, WatchTimes
from rljob_operator.shell.caches.views import own_key
from rljob_operator.shell.kopf.settings import kopf_settings
from rljob_operator.shell.kopf.transport import kopf_session

THINGS = Resource("x.dev", "v1", "things", {"read": frozenset(), "items": frozenset({"name"})})


class Watched:
    """Kopf, with one informer and a handler of its own for it."""

    def __init__(self, api: FakeApi, selector: str | None, silence: float, page: int) -> None:
        self.api = api
        self.metrics = OperatorMetrics(CollectorRegistry())
        self.read: list[Any] = []
        """All objects that the cache made a value of."""
        self.cache: Cache[Any, str] = Cache(own_key, self.value_of, lambda job: None)
        times = WatchTimes(server=30.0, inactivity=silence, first_pause=0.02, longest_pause=0.1)
        self.informer = Informer(THINGS, self.cache, self.metrics, selector=selector, times=times)
        self.registry = kopf.OperatorRegistry()
        self.settings = kopf_settings([self.informer], times, 1.0)
        self.settings.watching.chunk_size = page
        self.insights = Insights()
        self.stop = asyncio.Event()
        self.events: list[Any] = []
        """All that came to Kopf's handler."""
        kopf.on.login(registry=self.registry)(self.log_in)
        kopf.on.event("things.x.dev", registry=self.registry)(self.learn)

    async def log_in(self, **_: Any) -> kopf.AiohttpSession:
        session = kopf_session(access_to(self.api.url), self.metrics, self.at)
        return kopf.AiohttpSession(server=self.api.url, aiohttp_session=session)

    def value_of(self, item: Any) -> str:
        self.read.append(copy.deepcopy(item))
        return str(item.get("value", ""))

    async def learn(self, event: kopf.RawEvent, **_: Any) -> None:
        self.events.append(copy.deepcopy(dict(event)))
        self.informer.take(event["type"], event["object"])

    def at(self, path: str) -> Informer | None:
        return self.informer if path == THINGS.path() else None

    async def serve(self) -> None:
        await self.insights.ready_resources.wait()
        async with self.insights.revised:
            self.insights.watched_resources.add(
                kopf.Resource("x.dev", "v1", "things", namespaced=True, verbs=frozenset({"list", "watch"}))
            )
            self.insights.revised.notify_all()

    def names(self) -> set[str]:
        return {key.name for key in self.cache.jobs()}

    async def sees(self, *names: str) -> None:
        await until(lambda: self.names() == set(names), lambda: f"{self.names()} {self.informer.problem}")

    def restarts(self, cause: str) -> float:
        return self.metrics.watch_restarts.labels("things.x.dev", cause)._value.get()

    @property
    def lists(self) -> int:
        return self.api.count("GET", "limit")

    @property
    def writes(self) -> list[tuple[str, str]]:
        return [(verb, path) for verb, path in self.api.requests if verb != "GET"]


@asynccontextmanager
async def watching(
    names: str = "",
    selector: str | None = None,
    silence: float = 0.5,
    page: int = 3,
    prepare: Callable[[FakeApi], Any] = lambda api: None,
) -> AsyncIterator[Watched]:
    async with serving(FakeApi()) as api:
        for name in names:
            await api.put("things", thing(name))
        prepare(api)
        seen = Watched(api, selector, silence, page)
        tasks = await kopf.spawn_tasks(
            registry=seen.registry,
            settings=seen.settings,
            insights=seen.insights,
            standalone=True,
            clusterwide=True,
            stop_flag=seen.stop,
        )
        await seen.serve()
        try:
            yield seen
            for task in tasks:
                assert not task.done(), f"Kopf's {task.get_name()} ended: {task}"
        finally:
            seen.stop.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert seen.writes == []


def thing(name: str, value: str = "", **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": labels}, "value": value}


def test_a_list_is_read_in_pages_and_a_watch_follows() -> None:
    async def run() -> None:
        async with watching("abcdefg") as seen:
            await seen.sees(*"abcdefg")
            assert seen.api.count("GET", "limit=3") == 3
            await seen.api.put("things", thing("h"))
            await seen.api.remove("things", "a")
            await seen.sees(*"bcdefgh")
            assert seen.informer.is_fresh

    asyncio.run(run())


def test_only_selected_objects_are_asked_for() -> None:
    async def run() -> None:
        async with watching(selector="mine") as seen:
            await until(lambda: seen.api.open_watches == 1)
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
            await until(lambda: seen.api.open_watches == 1)
            lists = seen.lists
            for name in "bcd":
                await seen.api.drop_watches()
                await seen.api.put("things", thing(name))
            await seen.sees(*"abcd")
            assert seen.lists == lists

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
            await until(lambda: seen.api.open_watches == 1)
            seen.api.fail("GET", "things", watch=True, code=410)
            await seen.api.drop_watches()
            await seen.api.put("things", thing("d"))
            await seen.sees("b", "c", "d")
            assert seen.restarts("expired") >= 1

    asyncio.run(run())


def test_410_between_two_pages_begins_the_list_anew() -> None:
    def prepare(api: FakeApi) -> None:
        fault = api.fail("GET", "things", code=410)
        fault.hits = lambda request: "continue" in request.query

    async def run() -> None:
        async with watching("abcd", page=2, prepare=prepare) as seen:
            await until(seen.informer.synced.is_set)
            assert len(seen.cache) == 4
            assert seen.api.count("GET", "continue") == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    "fault",
    [
        {"code": 500},
        {"code": 503},
        {"code": 403},
        {"code": 404},
        {"code": 400},
        {"code": 422},
        {"code": 429, "headers": {"Retry-After": "0"}},
        {"drop": True},
    ],
)
@pytest.mark.parametrize("watch", [True, False])
def test_errors_are_tried_again(fault: dict[str, Any], watch: bool) -> None:
    async def run() -> None:
        async with watching("a") as seen:
            await until(lambda: seen.api.open_watches == 1)
            seen.api.fail("GET", "things", watch=watch, times=12, **fault)
            seen.api.compact()
            await seen.api.drop_watches()
            await seen.api.put("things", thing("b"))
            await seen.sees("a", "b")

    asyncio.run(run())


def test_401_logs_in_again() -> None:
    async def run() -> None:
        async with watching("a") as seen:
            await until(lambda: seen.api.open_watches == 1)
            seen.api.fail("GET", "things", times=2, code=401)
            await seen.api.drop_watches()
            await seen.api.put("things", thing("b"))
            await seen.sees("a", "b")

    asyncio.run(run())


def test_429_waits_as_long_as_the_server_asks() -> None:
    async def run() -> None:
        def prepare(api: FakeApi) -> None:
            api.fail("GET", "things", watch=False, code=429, headers={"Retry-After": "1"})

        began = asyncio.get_running_loop().time()
        async with watching("a", prepare=prepare) as seen:
            await seen.sees("a")
            assert asyncio.get_running_loop().time() - began >= 1.0
            assert seen.metrics.requests.labels("GET", "429")._value.get() == 1

    asyncio.run(run())


def test_a_silent_stream_is_given_up_and_looks_old_meanwhile() -> None:
    async def run() -> None:
        async with watching("a", silence=0.2) as seen:
            await until(lambda: seen.api.open_watches == 1)
            seen.api.silent = True
            seen.api.fail("GET", "things", times=10**6, delay=30.0)
            await until(lambda: not seen.informer.is_fresh and seen.informer.age > 0.4)
            seen.api.silent = False
            seen.api.faults.clear()
            await seen.api.put("things", thing("b"))
            await seen.sees("a", "b")
            assert seen.restarts("silent") >= 1
            await until(lambda: seen.informer.is_fresh)

    asyncio.run(run())


def test_a_kind_that_is_not_there_is_named_and_watched_once_it_is() -> None:
    async def run() -> None:
        async with watching(prepare=lambda api: api.absent.add("things")) as seen:
            await until(lambda: "does not know things.x.dev; is its CRD installed" in seen.informer.problem)
            assert not seen.informer.is_fresh
            seen.api.absent.clear()
            await seen.api.put("things", thing("a"))
            await seen.sees("a")
            assert seen.informer.is_fresh
            seen.api.absent.add("things")
            await seen.api.drop_watches()
            await until(lambda: "does not know" in seen.informer.problem)
            seen.api.absent.clear()
            await until(lambda: not seen.informer.problem)

    asyncio.run(run())


RUBBISH = [
    b"no JSON\n",
    b"[]\n",
    b'{"type": "STRANGE", "object": {"metadata": {"resourceVersion": "11"}}}\n',
    b'{"type": "ADDED", "object": {"metadata": {}}}\n',
    b'{"type": "ADDED", "object": {"metadata": {"name": "z", "uid": "z", "resourceVersion": "abc"}}}\n',
    b'{"type":"ADDED","object":{"metadata":{"name":"z","uid":"z","resourceVersion":"99"}\n',
    b'{"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "etcdserver: no leader"}}\n',
    b'{"type": "ERROR", "object": {"kind": "Status"}}\n',
]


@pytest.mark.parametrize("rubbish", RUBBISH)
def test_rubbish_in_the_stream_reads_the_list_again(rubbish: bytes) -> None:
    async def run() -> None:
        async with watching("a") as seen:
            await seen.sees("a")
            await until(lambda: seen.api.open_watches == 1)
            lists = seen.lists
            seen.api.rubbish = rubbish
            await until(lambda: seen.restarts("unreadable") + seen.restarts("error") == 1)
            await seen.api.put("things", thing("b"))
            await seen.sees("a", "b")
            assert seen.lists == lists + 1

    asyncio.run(run())


def test_an_object_that_the_handler_cannot_read_hurts_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with watching("a") as seen:
            await seen.sees("a")
            seen.cache._value_of = lambda item: item["value"]["deep"]
            await seen.api.put("things", thing("b"))
            await until(lambda: "failed with an exception and will ignore it" in caplog.text)
            seen.cache._value_of = lambda item: item["value"]
            await seen.api.put("things", thing("c"))
            await seen.sees("a", "c")

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())


def test_an_event_may_come_in_many_pieces() -> None:
    async def run() -> None:
        async with watching("a", silence=5.0) as seen:
            await seen.sees("a")
            await seen.api.put("things", thing("b", "ä" * 700_000))
            await seen.sees("a", "b")
            assert seen.cache.get("default", "b") == "ä" * 700_000

    asyncio.run(run())


def test_what_vanished_while_nobody_watched_is_forgotten() -> None:
    async def run() -> None:
        async with watching("abc") as seen:
            await seen.sees(*"abc")
            await until(lambda: seen.api.open_watches == 1)
            seen.api.silent = True
            for name in "abc":
                await seen.api.remove("things", name)
            seen.api.compact()
            seen.api.silent = False
            await seen.sees()
            assert seen.lists == 2

    asyncio.run(run())


def test_finalizers_of_other_operators_that_are_written_with_kopf_stay() -> None:
    async def run() -> None:
        async with watching() as seen:
            item = thing("a")
            item["metadata"]["finalizers"] = ["kopf.zalando.org/KopfFinalizerMarker"]
            await seen.api.put("things", item)
            await seen.sees("a")
            await asyncio.sleep(0.3)
            assert seen.writes == []

    asyncio.run(run())


def test_a_watch_that_ends_at_once_is_not_opened_again_without_a_pause() -> None:
    async def run() -> None:
        async with watching("a") as seen:
            await seen.sees("a")
            seen.api.end_watches.set()
            before, began = seen.api.count("GET", "watch"), time.monotonic()
            await until(lambda: seen.api.count("GET", "watch") - before >= 20)
            # 0.02, 0.04, 0.08 s and then some 0.1 s between two, where it does not last that long itself.
            assert time.monotonic() - began > 0.3
            seen.api.end_watches.clear()

    asyncio.run(run())


def test_a_list_that_expires_each_time_is_not_read_again_without_a_pause() -> None:
    async def run() -> None:
        def prepare(api: FakeApi) -> None:
            api.fail("GET", "things", watch=False, times=10**6, code=410)

        async with watching("a", prepare=prepare) as seen:
            await until(lambda: seen.lists >= 1)
            before, began = seen.lists, time.monotonic()
            await until(lambda: seen.lists - before >= 8)
            assert time.monotonic() - began > 0.4
            seen.api.faults.clear()
            await seen.sees("a")

    asyncio.run(run())


@pytest.mark.parametrize("how", ["silent", "bookmark", "too large", "compacted"])
def test_a_cluster_that_was_put_back_is_read_anew(how: str) -> None:
    """The server sends nothing to a watch from a version that it has not reached, or says that it is too large."""

    async def run() -> None:
        async with watching("ab", silence=0.4) as seen:
            await seen.sees("a", "b")
            backup, version = copy.deepcopy(seen.api.objects), seen.api.version
            await seen.api.put("things", thing("a", "lost"))
            await seen.api.remove("things", "b")
            await seen.api.put("things", thing("c"))
            await seen.sees("a", "c")
            if how == "compacted":  # `etcdutl snapshot restore --bump-revision --mark-compacted`
                seen.api.put_back(backup, version + 1000)
                seen.api.compact()
            else:
                seen.api.put_back(backup, version)
            if how == "bookmark":
                seen.api.rubbish = b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "12"}}}\n'
            if how == "too large":
                seen.api.fail(
                    "GET", "things", watch=True, code=504, message="Too large resource version: 15, current: 12"
                )
            await seen.api.drop_watches()
            await until(lambda: seen.cache.get("default", "a") == "", lambda: seen.names())
            await seen.sees("a", "b")
            assert seen.restarts("restored") == (how != "compacted")
            # What happens then is seen, with versions that were there before.
            await seen.api.put("things", thing("a", "new"))
            await until(lambda: seen.cache.get("default", "a") == "new")
            await seen.api.remove("things", "b")
            await seen.sees("a")

    asyncio.run(run())


def test_what_nobody_reads_is_dropped() -> None:
    items = [{"name": "a", "template": "x" * 1000}, {"template": "x"}]

    async def run() -> None:
        async with watching("a") as seen:
            await seen.sees("a")
            await seen.api.put("things", {**thing("b"), "spec": {"template": "x" * 1000, "read": 1, "items": items}})
            await seen.sees("a", "b")
            for item in seen.read:
                assert "managedFields" not in item["metadata"]
            assert seen.read[-1]["spec"] == {"read": 1, "items": [{"name": "a"}, {}]}

    asyncio.run(run())


def test_the_echo_of_an_own_write_is_no_event() -> None:
    """Kopf still learns its version, so that a broken watch goes on from there."""

    async def run() -> None:
        async with watching("a") as seen:
            await seen.sees("a")
            await until(lambda: seen.api.open_watches == 1)
            own = {**seen.api.objects["things"]["default", "a"], "value": "own"}
            own["metadata"] = {**own["metadata"], "resourceVersion": str(seen.api.version + 1)}
            seen.cache.learn(own)
            before = len(seen.read)
            await seen.api.put("things", thing("a", "own"))
            await seen.api.put("things", thing("b"))
            await seen.sees("a", "b")
            assert [item["metadata"]["name"] for item in seen.read[before:]] == ["b"]
            await seen.api.remove("things", "a")
            await seen.sees("b")

    asyncio.run(run())


def test_while_a_list_is_taken_in_no_state_counts_as_known() -> None:
    """The cluster may have been put back: what is known has larger versions than all that follows the list."""

    async def run() -> None:
        async with watching("a") as seen:
            await seen.sees("a")
            item = seen.api.objects["things"]["default", "a"]
            older = {**item, "metadata": {**item["metadata"], "resourceVersion": "2"}}
            page: Any = {"metadata": {"resourceVersion": "2"}, "items": [older]}
            assert seen.informer.has(older)
            seen.informer.listed(page, is_first=True)
            assert not seen.informer.has(older)
            seen.informer.take(None, older)
            assert seen.informer.has(older)
            assert seen.cache.version("default", "a") == 2

    asyncio.run(run())


def test_events_after_a_list_do_not_pass_through_kopf_s_handlers() -> None:
    """Kopf has their versions all the same: a watch that broke goes on from there, and nothing is listed again."""

    async def run() -> None:
        async with watching("a") as seen:
            await seen.sees("a")
            await until(lambda: seen.api.open_watches == 1)
            before, lists = len(seen.events), seen.lists
            for value in "123":
                await seen.api.put("things", thing("a", value))
            await seen.api.put("things", thing("b"))
            await seen.api.remove("things", "b")
            await seen.api.put("things", thing("c"))
            await seen.sees("a", "c")
            assert seen.cache.get("default", "a") == "3"
            await seen.api.drop_watches()
            read = len(seen.read)
            await seen.api.put("things", thing("d"))
            await seen.sees("a", "c", "d")
            assert [item["metadata"]["name"] for item in seen.read[read:]] == ["d"]
            assert (len(seen.events), seen.lists) == (before, lists)

    asyncio.run(run())


def test_events_wait_behind_a_list_that_is_taken_in() -> None:
    """The list may be of a cluster that was put back: what it shows has to be taken in before what follows it."""

    async def run() -> None:
        async with watching("a") as seen:
            await seen.sees("a")
            await until(lambda: seen.api.open_watches == 1)
            item = seen.api.objects["things"]["default", "a"]
            version = str(seen.api.version)
            page: Any = {"metadata": {"resourceVersion": version}, "items": [item]}
            seen.informer.listed(page, is_first=True)
            before = len(seen.events)
            await seen.api.put("things", thing("b"))
            await until(lambda: len(seen.events) > before)
            assert seen.events[-1]["object"]["metadata"]["name"] == "b"
            seen.informer.take(None, item)
            await seen.api.put("things", thing("c"))
            await seen.sees("a", "b", "c")
            assert [event["object"]["metadata"]["name"] for event in seen.events[before:]] == ["b"]

    asyncio.run(run())


@pytest.mark.parametrize("late", ["ADDED", "MODIFIED", "DELETED"])
def test_an_event_that_comes_behind_a_newer_one_changes_nothing(late: str) -> None:
    """An object was deleted and made anew under its name while an event of the old one was still on its way."""

    async def run() -> None:
        async with watching("a") as seen:
            await seen.sees("a")
            old = copy.deepcopy(seen.api.objects["things"]["default", "a"])
            await seen.api.remove("things", "a")
            await seen.sees()
            await seen.api.put("things", thing("a", "new"))
            await seen.sees("a")
            seen.informer.take(late, {**old, "value": "old"})
            assert seen.cache.get("default", "a") == "new"

    asyncio.run(run())
