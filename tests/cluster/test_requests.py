"""How much the operator asks of the API server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
from control_plane import ControlPlane
from fault_proxy import FaultProxy
from operator_process import OperatorProcess
from ray_driver import Attempt
from ray_standin import RayStandIn
from scenarios import Case

pytestmark = pytest.mark.cluster
MOST_WRITES_TO_RUNNING = 8
QUIET_SECONDS = 12.0


@pytest.fixture(scope="module")
def counted(control_plane: ControlPlane, ray: RayStandIn) -> Iterator[tuple[FaultProxy, OperatorProcess]]:
    control_plane.use_kuberay("1.6.2")
    proxy = FaultProxy(control_plane)
    proxy.start()
    operator = OperatorProcess(control_plane, ray, None, proxy.url)
    operator.start()
    yield proxy, operator
    operator.kill()
    proxy.stop()


def test_writes_from_creation_to_running(
    counted: tuple[FaultProxy, OperatorProcess], control_plane: ControlPlane, ray: RayStandIn
) -> None:
    proxy, operator = counted
    case = Case(control_plane, ray, operator)
    case.create("steps=1000", attempts=[Attempt(step_seconds=0.5)])
    case.wait("Running")
    writes = proxy.counts(writes=True, namespace=case.namespace)
    assert sum(writes.values()) <= MOST_WRITES_TO_RUNNING, writes
    case.close()


def test_a_running_job_writes_its_status_at_most_every_ten_seconds(
    counted: tuple[FaultProxy, OperatorProcess], control_plane: ControlPlane, ray: RayStandIn
) -> None:
    proxy, operator = counted
    case = Case(control_plane, ray, operator)
    case.create("steps=100000", attempts=[Attempt(step_seconds=0.2)])
    case.wait_status(lambda status: status.get("progress", {}).get("step", 0) >= 1)
    began = time.time()
    time.sleep(32)
    writes = proxy.requests(since=began, writes=True, namespace=case.namespace)
    assert 2 <= len(writes) <= 4, writes
    assert all(later.time - earlier.time >= 9.9 for earlier, later in pairwise(writes))
    case.close()


def test_finished_and_suspended_jobs_cause_no_request(
    counted: tuple[FaultProxy, OperatorProcess], control_plane: ControlPlane, ray: RayStandIn
) -> None:
    proxy, operator = counted
    case = Case(control_plane, ray, operator)
    case.create(name="done")
    case.create(name="failed", attempts=[Attempt(exit_code=2)])
    case.create("suspend=true", name="suspended")
    case.wait("Succeeded", name="done")
    case.wait("Failed", name="failed")
    case.wait("Suspended", name="suspended")
    time.sleep(5)
    began = time.time()
    time.sleep(QUIET_SECONDS)
    assert proxy.requests(since=began, namespace=case.namespace) == []
    for name in ("done", "failed", "suspended"):
        assert ray.requests(case.namespace, name, since=began) == []
    case.close()
