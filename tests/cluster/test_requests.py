"""Number of the operator's requests to the API server."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from fault_proxy import FaultProxy
from kube import wait_until
from ray_driver import Attempt
from scenarios import Case, Running, Scenarios

pytestmark = pytest.mark.cluster
scenario = Scenarios(one_operator=False)
MOST_WRITES_TO_RUNNING = 8
QUIET_SECONDS = 12.0
SETTLED_SECONDS = 5.0


def counted(body: Callable[[Case, FaultProxy], None]) -> Callable[[Case], None]:
    """Give a scenario an operator of its own whose requests are counted."""

    def with_proxy(case: Case) -> None:
        proxy = FaultProxy(case.control_plane)
        proxy.start()
        operator = case.own_operator(proxy)
        operator.start()
        try:
            body(case, proxy)
        finally:
            operator.kill()
            proxy.stop()

    with_proxy.__name__ = body.__name__
    return scenario(with_proxy)


@counted
def writes_from_creation_to_running(case: Case, proxy: FaultProxy) -> None:
    case.create("steps=1000", attempts=[Attempt(step_seconds=0.5)])
    case.wait("Running")
    writes = proxy.counts(writes=True)
    assert 3 <= sum(writes.values()) <= MOST_WRITES_TO_RUNNING, writes


@counted
def a_running_job_writes_its_status_at_most_every_ten_seconds(case: Case, proxy: FaultProxy) -> None:
    case.create("steps=100000", attempts=[Attempt(step_seconds=0.2)])
    case.wait_status(lambda status: status.get("progress", {}).get("step", 0) >= 1)
    began = time.time()
    time.sleep(32)
    # By their number: a write that came late would be nearer to the one after it.
    writes = proxy.requests(since=began, writes=True)
    assert 2 <= len(writes) <= 4, writes


@counted
def finished_and_suspended_jobs_cause_no_request(case: Case, proxy: FaultProxy) -> None:
    case.create(name="done")
    case.create(name="failed", attempts=[Attempt(exit_code=2)])
    case.create("suspend=true", name="suspended")
    case.wait("Succeeded", name="done")
    case.wait("Failed", name="failed")
    case.wait("Suspended", name="suspended")
    # What remains to be done about a job that has ended takes as long as it takes.
    assert wait_until(lambda: not proxy.requests(since=time.time() - SETTLED_SECONDS), 60), proxy.requests()[-5:]
    began = time.time()
    time.sleep(QUIET_SECONDS)
    assert proxy.requests(since=began) == []
    for name in ("done", "failed", "suspended"):
        assert case.ray.requests(case.namespace, name, since=began) == []


@pytest.mark.parametrize("name", scenario.functions)
def test_requests(name: str, running: Running) -> None:
    running.result(name)
