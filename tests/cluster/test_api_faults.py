"""The API server's bad days: dropped watches, conflicts, expired lists, throttling, errors, lost and slow answers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from fault_proxy import WRITES, Fault, FaultProxy
from kube import wait_until
from operator_process import OperatorProcess
from ray_driver import Attempt
from scenarios import Case, Running, Scenarios
from support.samples import drawn

pytestmark = pytest.mark.cluster
scenario = Scenarios(together=4, one_operator=False)
READS = frozenset({"get", "list", "watch"})
WATCHES = frozenset({"watch"})
FAULTS = {
    "conflict": [Fault("status", code=409, verbs=WRITES, probability=0.3)],
    "expired": [Fault("gone", verbs=WATCHES, times=5), Fault("status", code=410, verbs=READS, probability=0.3)],
    "throttled": [Fault("status", code=429, probability=0.3)],
    "error": [Fault("status", code=500, probability=0.3)],
    "dropped": [Fault("drop", probability=0.3)],
    "answer_lost": [Fault("lose", verbs=WRITES, probability=0.3)],
    "slow": [Fault("slow", seconds=2.0, probability=0.4)],
    "watch_cut": [Fault("cut", verbs=WATCHES, seconds=0.5)],
}


def behind_proxy(body: Callable[[Case, FaultProxy, OperatorProcess], None]) -> Callable[[Case], None]:
    """Give a scenario an operator of its own that reaches the API server through a proxy."""

    def with_proxy(case: Case) -> None:
        proxy = FaultProxy(case.control_plane, seed=7)
        proxy.start()
        # The faults hit the Lease too: losing it ends the process, which its Deployment would start again.
        operator = case.own_operator(proxy, lease_seconds="120", renew_seconds="100")
        operator.start()
        try:
            body(case, proxy, operator)
        finally:
            operator.kill()
            proxy.stop()

    with_proxy.__name__ = body.__name__
    return scenario(with_proxy)


def live(case: Case, name: str, failing: bool) -> None:
    """A whole life; what must hold of it whatever the API server does."""
    first = Attempt(exit_code=1, fail_at_step=1) if failing else Attempt()
    case.create(name=name, attempts=[first, Attempt()])
    done = case.wait("Succeeded", name=name, seconds=240)
    uid = done["metadata"]["uid"]
    assert case.submissions(name) == [f"rljob-{uid}-{number}" for number in range(2 if failing else 1)]
    assert done["status"].get("restarts", 0) == int(failing)
    assert done["status"]["progress"]["step"] == 3


def lives_through(name: str) -> None:
    def lives(case: Case, proxy: FaultProxy, operator: OperatorProcess) -> None:
        proxy.inject(*FAULTS[name])
        proxy.drop_watches()
        try:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda failing: live(case, f"job-{int(failing)}", failing), (False, True)))
        finally:
            proxy.heal()
        assert any(request.fault for request in proxy.requests()), "the fault never happened"
        assert operator.process.running
        assert wait_until(operator.ready, 60), "ready again when the faults have ended"

    lives.__name__ = name
    behind_proxy(lives)


for _name in FAULTS:
    lives_through(_name)


@behind_proxy
def a_throttled_request_waits_as_long_as_it_was_told(case: Case, proxy: FaultProxy, operator: OperatorProcess) -> None:
    proxy.inject(Fault("status", code=429, verbs=WRITES, resources=frozenset({"rayclusters"}), times=1))
    case.create()
    case.wait("Succeeded")
    first, again = [one for one in proxy.requests(writes=True) if one.resource == "rayclusters"][:2]
    assert first.fault == "status 429"
    assert again.time - first.time >= 0.95, "Retry-After said one second"


@behind_proxy
def an_api_server_that_is_away_for_a_while(case: Case, proxy: FaultProxy, operator: OperatorProcess) -> None:
    case.create("steps=60", attempts=[Attempt(step_seconds=0.3)])
    case.wait("Running")
    proxy.inject(Fault("drop"))
    proxy.drop_watches()
    assert not wait_until(lambda: not operator.process.running, 10), operator.process.tail()
    proxy.heal()
    done = case.wait("Succeeded", seconds=120)
    assert done["status"].get("restarts", 0) == 0, "the driver never noticed"


@behind_proxy
def without_its_lease_the_operator_does_nothing(case: Case, proxy: FaultProxy, operator: OperatorProcess) -> None:
    operator.kill()
    short = case.own_operator(proxy, lease_seconds="3", renew_seconds="2", retry_seconds="0.5")
    short.start()
    proxy.inject(Fault("drop", resources=frozenset({"leases"})))
    wait_until(lambda: False, 4)
    proxy.forget()
    case.create()
    wait_until(lambda: False, 4)
    assert proxy.requests(writes=True) == []
    proxy.heal()
    case.wait("Succeeded")
    short.kill()


@behind_proxy
def the_standby_takes_over(case: Case, proxy: FaultProxy, operator: OperatorProcess) -> None:
    operator.kill()
    shared = {"lease_name": case.namespace, "lease_seconds": "4", "renew_seconds": "3", "retry_seconds": "0.5"}
    first, second = (case.own_operator(proxy, **shared, identity=name) for name in ("first", "second"))
    first.start()
    second.spawn()
    job = case.create("steps=60", attempts=[Attempt(step_seconds=0.3)])
    case.wait("Running")
    first.kill()
    done = case.wait("Succeeded", seconds=120)
    assert second.process.running
    assert done["status"].get("restarts", 0) == 0
    assert case.submissions() == [f"rljob-{job['metadata']['uid']}-0"]
    lease = case.kube.get("Lease", "default", case.namespace)
    assert lease["spec"]["holderIdentity"] == "second"
    second.kill()


@scenario
def jobs_that_cannot_get_on_do_not_hold_up_the_others(case: Case) -> None:
    operator = case.own_operator(concurrency="2")
    operator.start()
    metadata = {"name": "one", "namespace": case.namespace}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata}
    case.kube.create({**quota, "spec": {"hard": {"count/rayclusters.ray.io": "0"}}})
    case.kube.wait_for("ResourceQuota", case.namespace, "one", lambda quota: quota.get("status", {}).get("hard"))
    for number in range(6):
        case.create(name=f"job-{number}")
    case.wait_status(lambda status: status.get("phase"), name="job-5")
    case.kube.delete("ResourceQuota", case.namespace, "one")
    case.create(name="sound")
    case.wait("Succeeded", name="sound", seconds=60)
    case.wait("Succeeded", name="job-0", seconds=180)
    operator.kill()


OTHERS = [name for name in scenario.functions if name not in FAULTS]


@pytest.mark.parametrize("name", [*drawn("API faults", list(FAULTS), 2), *drawn("API servers", OTHERS, 2)])
def test_fault(name: str, running: Running) -> None:
    running.result(name)
