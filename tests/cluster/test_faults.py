"""The API server's bad days: dropped watches, conflicts, expired lists, throttling, errors, lost and slow answers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from control_plane import ControlPlane
from fault_proxy import WRITES, Fault, FaultProxy
from kube import wait_until
from operator_process import OperatorProcess
from ray_driver import Attempt
from ray_standin import RayStandIn
from scenarios import Case

pytestmark = pytest.mark.cluster
READS = frozenset({"get", "list", "watch"})
JOBS = 4


@pytest.fixture(scope="module")
def faulty(control_plane: ControlPlane, ray: RayStandIn) -> Iterator[tuple[FaultProxy, OperatorProcess]]:
    control_plane.use_kuberay("1.6.2")
    proxy = FaultProxy(control_plane, seed=7)
    proxy.start()
    # The faults hit the Lease too: losing it ends the process, which its Deployment would start again.
    lease = {"lease_seconds": "120", "renew_seconds": "100"}
    operator = OperatorProcess(control_plane, ray, None, proxy.url, settings=lease)
    operator.start()
    yield proxy, operator
    operator.kill()
    proxy.stop()


def live(case: Case, name: str, failing: bool) -> None:
    """A whole life; what must hold of it whatever the API server does."""
    first = Attempt(exit_code=1, fail_at_step=1) if failing else Attempt()
    case.create(name=name, attempts=[first, Attempt()])
    done = case.wait("Succeeded", name=name, seconds=240)
    uid = done["metadata"]["uid"]
    assert case.submissions(name) == [f"rljob-{uid}-{number}" for number in range(2 if failing else 1)]
    assert done["status"].get("restarts", 0) == int(failing)
    assert done["status"]["progress"]["step"] == 3


@pytest.mark.parametrize(
    "faults",
    [
        [Fault("status", code=409, verbs=WRITES, probability=0.3)],
        [Fault("status", code=410, verbs=READS, probability=0.3), Fault("gone", verbs=frozenset({"watch"}), times=5)],
        [Fault("status", code=429, probability=0.3)],
        [Fault("status", code=500, probability=0.3)],
        [Fault("drop", probability=0.3)],
        [Fault("lose", verbs=WRITES, probability=0.3)],
        [Fault("slow", seconds=2.0, probability=0.3)],
        [Fault("cut", verbs=frozenset({"watch"}), seconds=0.5)],
    ],
    ids=["conflict", "expired", "throttled", "error", "dropped", "answer-lost", "slow", "watch-cut"],
)
def test_lives_through(
    faulty: tuple[FaultProxy, OperatorProcess], control_plane: ControlPlane, ray: RayStandIn, faults: list[Fault]
) -> None:
    proxy, operator = faulty
    case = Case(control_plane, ray, operator)
    proxy.forget()
    proxy.inject(*faults)
    proxy.drop_watches()
    try:
        with ThreadPoolExecutor(JOBS) as pool:
            list(pool.map(lambda number: live(case, f"job-{number}", number % 2 == 1), range(JOBS)))
    finally:
        proxy.heal()
    assert any(request.fault for request in proxy.requests()), "the fault never happened"
    assert operator.process.running
    assert wait_until(operator.ready, 60), "ready again when the faults have ended"
    case.close()


def test_a_throttled_request_waits_as_long_as_it_was_told(
    faulty: tuple[FaultProxy, OperatorProcess], control_plane: ControlPlane, ray: RayStandIn
) -> None:
    proxy, operator = faulty
    case = Case(control_plane, ray, operator)
    proxy.forget()
    proxy.inject(Fault("status", code=429, verbs=WRITES, times=1))
    case.create()
    case.wait("Succeeded")
    asked = proxy.requests(writes=True, namespace=case.namespace)
    refused = next(index for index, request in enumerate(asked) if request.fault)
    again = next(request for request in asked[refused + 1 :] if request.resource == asked[refused].resource)
    assert again.time - asked[refused].time >= 0.95, "Retry-After said one second"
    case.close()


def test_an_api_server_that_is_away_for_a_while(
    faulty: tuple[FaultProxy, OperatorProcess], control_plane: ControlPlane, ray: RayStandIn
) -> None:
    proxy, operator = faulty
    case = Case(control_plane, ray, operator)
    case.create("steps=20", attempts=[Attempt(step_seconds=0.3)])
    case.wait("Running")
    proxy.inject(Fault("drop"))
    proxy.drop_watches()
    assert not wait_until(lambda: not operator.process.running, 8), operator.process.tail()
    proxy.heal()
    done = case.wait("Succeeded", seconds=120)
    assert done["status"].get("restarts", 0) == 0, "the driver never noticed"
    case.close()


def test_one_broken_job_does_not_hold_up_the_others(
    faulty: tuple[FaultProxy, OperatorProcess], control_plane: ControlPlane, ray: RayStandIn
) -> None:
    _, operator = faulty
    broken, sound = Case(control_plane, ray, operator), Case(control_plane, ray, operator)
    metadata = {"name": "none", "namespace": broken.namespace}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata}
    broken.kube.create({**quota, "spec": {"hard": {"count/rayclusters.ray.io": "0"}}})
    for number in range(5):
        broken.create(name=f"job-{number}")
    sound.create()
    sound.wait("Succeeded", seconds=60)
    for case in (broken, sound):
        case.close()
