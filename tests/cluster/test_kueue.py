"""Jobs in Kueue's queues: admitted by a quota of NPUs, with the reason while they wait, preempted and gone on with."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from kube import Object, conditions, wait_until
from kueue_process import FLAVOR_LABEL, KUEUE, NPU, KueueProcess, running_kueue
from kwok_cluster import KwokCluster
from ray_driver import Attempt
from ray_standin import RayStandIn
from scenarios import Case, Running, Scenarios, selected
from support.samples import drawn

pytestmark = pytest.mark.cluster
scenario = Scenarios(settings={"kueue_priority_boost": "true"})
ENDLESS = Attempt(hang_at_step=1)
QUOTA = 2
URGENT = "test-urgent"
WORKLOADS = f"{KUEUE}/Workload"
BOOST = "kueue.x-k8s.io/priority-boost"


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, control_plane: KwokCluster, ray: RayStandIn) -> Iterator[Running]:
    """The scenarios of `scenarios.py` beside a Kueue, whose flavor is that of one of the nodes."""
    control_plane.use_kuberay("1.6.2")
    kube = control_plane.kube
    kube.patch("Node", None, "node-0", {"metadata": {"labels": {FLAVOR_LABEL: "a2"}}})
    urgent = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": URGENT}}
    kube.create({**urgent, "value": 1000})
    try:
        with (
            running_kueue(control_plane),
            scenario.started(selected(request), control_plane, ray) as running,
        ):
            yield running
    finally:
        kube.delete("scheduling.k8s.io/v1/PriorityClass", None, URGENT)
        kube.patch("Node", None, "node-0", {"metadata": {"labels": {FLAVOR_LABEL: None}}})


def queued(*settings: str, npus: int = QUOTA, queue: str = "rl") -> tuple[str, ...]:
    """Settings of a job of one node in a queue."""
    resources = ("resources.profile=ascend-a2", "resources.overrides.nodeSelector={}")
    return (*resources, f"resources.devicesPerNode={npus}", "scheduling.system=Kueue", f"scheduling.queue={queue}",
            *settings)  # fmt: skip


def make_queue(case: Case) -> None:
    KueueProcess(case.control_plane).queue(case.namespace, QUOTA)


def why(case: Case, name: str) -> dict[str, Any]:
    """Output of `kubectl rljob why`."""
    where = ("-n", case.namespace, "--kubeconfig", str(case.control_plane.admin))
    command = (sys.executable, "-m", "rljob_operator.plugin.main", "why", name, "-o", "json", *where)
    said: dict[str, Any] = json.loads(case.control_plane.execute(*command))
    return said


def wait_waiting(case: Case, name: str, *parts: str) -> Object:
    """Wait until the status says that it is queued, and all of this."""

    def says(status: Object) -> bool:
        condition = conditions({"status": status}).get("Queued", {})
        said = f"{condition.get('reason')}: {condition.get('message')}"
        return condition.get("status") == "True" and all(part in said for part in parts)

    return case.wait_status(says, name)


@scenario
def one_runs_and_the_other_waits_for_the_quota(case: Case) -> None:
    make_queue(case)
    pace = Attempt(step_seconds=1.0)
    case.create(*queued("steps=100"), name="first", attempts=[pace])
    case.wait("Running", name="first")
    # Kueue's: the selector of the flavor that it chose. The operator must not take it back.
    assert all(pod["spec"]["nodeSelector"][FLAVOR_LABEL] == "a2" for pod in case.pods(name="first"))
    case.create(*queued(), name="second")
    wait_waiting(case, "second", NPU, "insufficient unused quota")
    said = why(case, "second")
    assert said["reason"] == "Pending"
    assert f"insufficient unused quota for {NPU} in flavor {case.namespace}, {QUOTA} more needed" in said["message"]
    assert "it runs when other jobs of the queue end" in said["message"]
    assert case.pods(name="second") == []
    assert case.status("first")["phase"] == "Running"
    pace.step_seconds = 0.01  # so that it ends, however long the machine took for the above
    first = case.wait("Succeeded", name="first")["status"]
    second = case.wait("Succeeded", name="second")["status"]
    assert [len(status["attempts"]) for status in (first, second)] == [1, 1]
    assert first["completionTime"] <= second["runningTime"]


@scenario
def a_preempted_job_goes_on_from_its_checkpoint(case: Case) -> None:
    make_queue(case)
    # Far more than it makes until it is preempted, however slow the machine is.
    case.create(*queued("steps=200"), name="low", attempts=[Attempt(step_seconds=1.0), Attempt(step_seconds=0.01)])
    case.wait_status(lambda status: status.get("progress", {}).get("step", 0) >= 2, "low")
    pace = Attempt(step_seconds=1.0)
    case.create(*queued("steps=100", f"scheduling.priorityClass={URGENT}"), name="high", attempts=[pace])
    wait_waiting(case, "low", "Preempted", "a job of higher priority took its place")
    assert case.cluster("low") is not None
    case.wait("Running", name="high")
    assert case.pods(name="low") == []
    pace.step_seconds = 0.01
    high = case.wait("Succeeded", name="high")["status"]
    low = case.wait("Succeeded", name="low")["status"]
    assert low.get("restarts", 0) == 0
    assert [(one["reason"], one.get("counted", False)) for one in low["attempts"][:1]] == [("Preempted", False)]
    assert len(low["attempts"]) == 2
    assert low["progress"]["step"] == 200
    assert high["completionTime"] <= low["completionTime"]
    run = case.ray.run_of(case.job("low")["metadata"]["uid"])
    assert [record["step"] for record in run.records] == list(range(1, 201))


@scenario
def kueue_is_told_what_a_preemption_would_cost(case: Case) -> None:
    """Its webhook lets the annotations be written, and Kueue leaves them there."""
    make_queue(case)
    # It saves within a second and does not end while the rest of this happens, however slow the machine is.
    first, second = Attempt(step_seconds=0.5), Attempt(step_seconds=0.005)
    case.create(*queued("steps=1000", "checkpoint.everySteps=2"), name="low", attempts=[first, second])

    def notes() -> dict[str, str]:
        of_low = [one for one in case.kube.list(WORKLOADS, case.namespace) if "low" in one["metadata"]["name"]]
        return {name: value for one in of_low for name, value in (one["metadata"].get("annotations") or {}).items()}

    def is_told(boost: str) -> bool:
        return notes().get(BOOST, "0") == boost and notes().get("rljob.dev/last-checkpoint", "") != ""

    case.wait_status(lambda status: "lastCheckpoint" in status.get("progress", {}), "low")
    assert wait_until(lambda: is_told("0"), 60), notes()
    # As if it had been spared for long: with a checkpoint nothing is spared any more, nor while it waits.
    (low,) = case.kube.list(WORKLOADS, case.namespace)
    name = low["metadata"]["name"]
    case.kube.patch(WORKLOADS, case.namespace, name, {"metadata": {"annotations": {BOOST: "7"}}})
    assert wait_until(lambda: is_told("0"), 60), notes()
    pace = Attempt(step_seconds=1.0)
    case.create(*queued("steps=100", f"scheduling.priorityClass={URGENT}"), name="high", attempts=[pace])
    wait_waiting(case, "low", "Preempted")
    assert is_told("0"), notes()
    pace.step_seconds = 0.01
    case.wait("Succeeded", name="high")
    assert case.wait("Succeeded", name="low")["status"]["progress"]["step"] == 1000


@scenario
def more_than_the_queue_will_ever_have(case: Case) -> None:
    make_queue(case)
    case.create(*queued(npus=4))
    wait_waiting(case, "job", "ExceedsMaxQuota", NPU, "(4) > maximum capacity (2)", "spec.resources")
    assert case.pods() == []
    # A suspended job leaves the queue, and its Workload with it.
    case.change({"suspend": True})
    case.wait("Suspended")
    case.kube.wait_gone("RayCluster", case.namespace, "job", 60)


@scenario
def a_queue_that_is_not_there(case: Case) -> None:
    case.create(*queued(queue="rl"))
    wait_waiting(case, "job", "Inadmissible", "LocalQueue rl doesn't exist", "make the queue")
    make_queue(case)
    case.wait("Succeeded")
    assert why(case, "job")["reason"] == "Succeeded"


@scenario
def a_suspended_job_gives_its_quota_back(case: Case) -> None:
    make_queue(case)
    case.create(*queued(), name="first", attempts=[ENDLESS, Attempt()])
    case.wait("Running", name="first")
    case.create(*queued(), name="second")
    wait_waiting(case, "second", NPU)
    case.change({"suspend": True}, "first")
    case.wait("Suspended", name="first")
    case.wait("Succeeded", name="second")
    case.change({"suspend": False}, "first")
    assert case.wait("Succeeded", name="first")["status"]["progress"]["step"] == 3


@pytest.mark.parametrize("name", drawn("queues", list(scenario.functions), 2))
def test_queueing(name: str, running: Running) -> None:
    running.result(name)


@pytest.mark.usefixtures("running")
def test_kueue_spares_the_workload_whose_boost_is_higher(control_plane: KwokCluster, namespace: str) -> None:
    """The contract of `settings.kueuePriorityBoost`; of equal workloads the one that was admitted last goes."""
    kueue, kube = KueueProcess(control_plane), control_plane.kube
    kueue.queue(namespace, QUOTA, cpus="3")

    def taken(priority: int, boost: str) -> str:
        name = kueue.take(namespace, priority, "1", **{BOOST: boost})
        kube.wait_for(
            WORKLOADS, namespace, name, lambda one: conditions(one).get("Admitted", {}).get("status") == "True"
        )
        return name

    names = [taken(0, "3"), taken(0, "0"), taken(0, "3")]
    kueue.take(namespace, 1000, "1")
    kube.wait_for(WORKLOADS, namespace, names[1], lambda one: "Preempted" in conditions(one))
    assert [name for name in names if "Preempted" in conditions(kube.get(WORKLOADS, namespace, name))] == [names[1]]
