"""Only one replica acts, and it stops before another one may begin."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from fake_api import FakeApi, serving
from operator_cases import SETTINGS, a_case, access_to, fetched, manifest, until
from prometheus_client import CollectorRegistry

from rljob_api.status import RLJobStatus
from rljob_operator.shell.api.client import ApiClient
from rljob_operator.shell.api.leader import LeaderElection, LeadershipLost
from rljob_operator.shell.api.metrics import OperatorMetrics
from rljob_operator.state.observed import Observed
from rljob_operator.state.plan import Plan

TIMES = {"lease_seconds": 1.0, "renew_seconds": 0.6, "retry_seconds": 0.1}
PATIENT = {"lease_seconds": 100.0, "renew_seconds": 60.0, "retry_seconds": 0.1}


@asynccontextmanager
async def replicas(count: int, times: dict[str, float] = TIMES) -> AsyncIterator[tuple[FakeApi, list[LeaderElection]]]:
    async with serving(FakeApi()) as api:
        clients, elections = [], []
        for number in range(count):
            client = ApiClient(access_to(api.url).configuration, OperatorMetrics(CollectorRegistry()), try_seconds=1.0)
            clients.append(client)
            elections.append(LeaderElection(client, replace(SETTINGS, identity=f"r{number}", **times)))
        yield api, elections
        for client in clients:
            await client.close()


def lease(api: FakeApi) -> dict[str, object]:
    return dict(api.objects["leases"]["rljob-system", "rljob-operator"]["spec"])


def test_a_standby_takes_over_only_after_the_leader_stopped_acting() -> None:
    async def run() -> None:
        async with replicas(2, {"lease_seconds": 6.0, "renew_seconds": 4.0, "retry_seconds": 0.1}) as (
            api,
            (first, second),
        ):
            await first.acquire()
            holding = asyncio.create_task(first.hold())
            waiting = asyncio.create_task(second.acquire())
            await asyncio.sleep(6.5)
            assert first.leads
            assert not waiting.done()
            # The leader's requests hang from now on; the standby's do not.
            first._client._official.configuration.host = "http://127.0.0.1:9"
            with pytest.raises(LeadershipLost):
                await asyncio.wait_for(holding, 60)
            stopped = time.monotonic()
            assert not first.leads
            assert not second.leads
            with pytest.raises(LeadershipLost):
                first.check()
            await asyncio.wait_for(waiting, 60)
            assert time.monotonic() > stopped
            assert lease(api)["holderIdentity"] == "r1"
            assert lease(api)["leaseTransitions"] == 2

    asyncio.run(run())


def test_a_leader_whose_clock_stands_still_or_is_wrong_keeps_the_lease_while_it_renews_it() -> None:
    async def run() -> None:
        async with replicas(1) as (api, (standby,)):
            for renewed in ("2001-01-01T00:00:00.000000Z", "2099-01-01T00:00:00.000000Z"):
                spec = {
                    "holderIdentity": "other",
                    "leaseDurationSeconds": 2,
                    "renewTime": renewed,
                    "leaseTransitions": 1,
                }
                item = {"metadata": {"name": "rljob-operator", "namespace": "rljob-system"}, "spec": spec}
                waiting = asyncio.create_task(standby.acquire())
                for _ in range(13):
                    await api.put("leases", item)
                    await asyncio.sleep(0.2)
                assert not waiting.done(), renewed
                last = time.monotonic()
                await asyncio.wait_for(waiting, 60)
                assert time.monotonic() - last > 0.5, "its time counts from the last renewal"

    asyncio.run(run())


def test_a_released_lease_is_taken_at_once() -> None:
    async def run() -> None:
        async with replicas(2, PATIENT) as (api, (first, second)):
            await first.acquire()
            await first.release()
            assert lease(api)["holderIdentity"] == ""
            assert not first.leads
            await asyncio.wait_for(second.acquire(), 60)

    asyncio.run(run())


def test_a_lease_is_given_back_although_a_renewal_was_cut_off() -> None:
    async def run() -> None:
        async with replicas(1) as (api, (first,)):
            await first.acquire()
            renewing = asyncio.create_task(first.hold())
            await asyncio.sleep(0.15)
            item = api.objects["leases"]["rljob-system", "rljob-operator"]
            await api.put("leases", item)
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            await first.release()
            assert lease(api)["holderIdentity"] == ""

    asyncio.run(run())


def test_of_two_that_take_it_at_the_same_time_one_gets_it() -> None:
    async def run() -> None:
        async with replicas(8, PATIENT) as (_, elections):
            tasks = [asyncio.create_task(one.acquire()) for one in elections]
            await asyncio.sleep(0.5)
            assert sum(one.leads for one in elections) == 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_a_leader_whose_lease_was_taken_stops_at_once() -> None:
    async def run() -> None:
        async with replicas(1, PATIENT) as (api, (first,)):
            await first.acquire()
            item = api.objects["leases"]["rljob-system", "rljob-operator"]
            await api.put("leases", {**item, "spec": {**item["spec"], "holderIdentity": "thief"}})
            with pytest.raises(LeadershipLost, match="thief holds the Lease"):
                await asyncio.wait_for(first.hold(), 60)
            assert not first.leads

    asyncio.run(run())


def test_short_faults_do_not_end_leadership() -> None:
    async def run() -> None:
        async with replicas(1, PATIENT) as (api, (first,)):
            await first.acquire()
            holding = asyncio.create_task(first.hold())
            for given in ({"code": 500}, {"drop": True, "times": 2}, {"code": 409}, {"delay": 0.25}):
                fault = api.fail("PUT", "leases", **given)
                await until(lambda fault=fault: fault.times == 0)
                before = lease(api)["renewTime"]
                await until(lambda before=before: lease(api)["renewTime"] != before)
                assert first.leads, given
            assert not holding.done()
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)

    asyncio.run(run())


def test_two_operators_hand_over_and_only_the_leader_reconciles() -> None:
    async def run() -> None:
        async with a_case() as case:
            seen: list[str] = []

            def plan(name: str) -> object:
                def reconcile(observed: Observed, now: float) -> Plan:
                    seen.append(name)
                    return Plan(RLJobStatus(message=name), requeue_after=0.05)

                return reconcile

            await case.api.put("rljobs", manifest())
            long = {"lease_seconds": 60.0, "renew_seconds": 40.0}
            async with case.operator(plan("first"), identity="first", **long) as leader:
                await until(lambda: "first" in seen)
                async with case.operator(plan("second"), identity="second", **long):
                    await asyncio.sleep(0.4)
                    assert set(seen) == {"first"}
                    leader.stop()
                    await until(lambda: case.status().get("message") == "second")

    asyncio.run(run())


def test_an_operator_that_lost_its_lease_stops_acting_and_leads_again_later() -> None:
    async def run() -> None:
        async with a_case() as case:
            looks: list[float] = []

            def reconcile(observed: Observed, now: float) -> Plan:
                looks.append(time.monotonic())
                return Plan(RLJobStatus(message=str(len(looks))), requeue_after=0.02)

            await case.api.put("rljobs", manifest())
            async with case.operator(reconcile, **TIMES) as controller:
                await until(lambda: len(looks) > 3)
                fault = case.api.fail("PUT", "leases", code=500, times=10**6)
                await until(lambda: not controller.leader.leads)
                lost = time.monotonic()
                await asyncio.sleep(0.3)
                assert max(looks) <= lost + 0.05
                code, metrics = await fetched(controller, "/metrics")
                assert (code, "rljob_operator_leader 0.0" in metrics, 'rljob="a"' in metrics) == (200, True, False)
                before = len(looks)
                fault.times = 0
                await until(lambda: len(looks) > before + 3)
                assert 'rljob="a"' in (await fetched(controller, "/metrics"))[1]

    asyncio.run(run())
