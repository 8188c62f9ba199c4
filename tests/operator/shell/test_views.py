"""Kubernetes objects as the reconciler sees them."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_operator.shell.caches.views import (
    cluster_state,
    explains_failure,
    pod_group_state,
    pod_view,
    queue_key,
    ray_pod_key,
    workload_state,
)
from rljob_operator.state.observed import WorkloadView

TIME = "2026-01-01T00:00:00Z"


def meta(name: str = "o", **more: Any) -> dict[str, Any]:
    return {"name": name, "namespace": "n", "uid": "u", "creationTimestamp": TIME, "generation": 2, **more}


def condition(kind: str, status: str = "True", reason: str = "R", message: str = "m") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def pod(status: dict[str, Any], **more: Any) -> Any:
    labels = {"ray.io/node-type": "worker", "rljob.dev/job": "a"}
    return pod_view({"metadata": meta("p", labels=labels, **more), "spec": {"nodeName": "n1"}, "status": status})


def test_a_pod_that_waits_says_why() -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "x" * 5000}}
    init = {"waiting": {"reason": "PodInitializing"}}
    view = pod(
        {
            "phase": "Pending",
            "initContainerStatuses": [{"name": "i", "state": init}],
            "containerStatuses": [{"name": "c", "state": waiting}],
        }
    )
    assert (view.waiting_reason, len(view.waiting_message), view.ready) == ("ImagePullBackOff", 1024, False)


def test_the_state_of_a_worker_before_it_was_deleted_explains_a_failure() -> None:
    ended = {"terminated": {"reason": "Error", "exitCode": 143}}
    failed = {"phase": "Failed", "containerStatuses": [{"name": "c", "state": ended}]}
    well = {"phase": "Running", "conditions": [condition("Ready")]}
    for status in (failed, well):
        assert explains_failure(pod(status), None)
        assert explains_failure(pod(status), pod(status, deletionTimestamp=TIME))
        assert not explains_failure(pod(status), pod(failed))
        assert not explains_failure(pod(status, deletionTimestamp=TIME), None)
    assert not explains_failure(pod({"phase": "Pending"}), None)
    assert not pod({**well, "phase": "Failed"}).ready


def test_when_a_pod_got_its_node() -> None:
    placed = {**condition("PodScheduled"), "lastTransitionTime": "2026-01-01T00:00:07Z"}
    assert pod({"conditions": [placed]}).scheduled == 1767225607.0
    assert pod({"conditions": [{**placed, "status": "False"}]}).scheduled is None


def test_a_container_that_ended_before_it_was_started_again() -> None:
    ended = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    again = {"name": "c", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended}
    init = {"name": "i", "state": {"terminated": {"reason": "Completed", "exitCode": 0}}}
    view = pod({"phase": "Running", "initContainerStatuses": [init], "containerStatuses": [again]})
    assert (view.terminated_reason, view.exit_code) == ("OOMKilled", 137)
    assert pod({"phase": "Running", "initContainerStatuses": [init]}).exit_code is None


@pytest.mark.parametrize(
    ("status", "lost", "reason"),
    [
        ({"phase": "Failed", "reason": "Evicted", "message": "disk"}, False, "Evicted"),
        ({"phase": "Running", "reason": "NodeLost"}, True, "NodeLost"),
        ({"phase": "Unknown"}, True, ""),
        ({"phase": "Failed", "conditions": [condition("DisruptionTarget", reason="DeletionByPodGC")]}, True, ""),
        (
            {"phase": "Running", "conditions": [condition("DisruptionTarget", reason="DeletionByTaintManager")]},
            True,
            "",
        ),
        (
            {"phase": "Running", "conditions": [condition("DisruptionTarget", reason="PreemptionByScheduler")]},
            False,
            "Evicted",
        ),
    ],
)
def test_lost_nodes_and_evictions(status: dict[str, Any], lost: bool, reason: str) -> None:
    view = pod(status)
    assert (view.node_lost, view.terminated_reason) == (lost, reason)


def test_unscheduled_and_gated_pods() -> None:
    view = pod({"conditions": [condition("PodScheduled", "False", "Unschedulable", "0/3 nodes")]})
    assert (view.phase, view.unschedulable, view.gated) == ("Pending", "0/3 nodes", False)
    view = pod({"conditions": [condition("PodScheduled", "False", "SchedulingGated")]})
    assert (view.unschedulable, view.gated) == ("", True)
    assert pod({}, deletionTimestamp=TIME).deleting


def test_pods_of_other_roles_are_not_kept() -> None:
    labels = {"ray.io/node-type": "redis-cleanup", "rljob.dev/job": "a"}
    assert ray_pod_key({"metadata": meta(labels=labels)}) is None
    assert ray_pod_key({"metadata": meta(labels={"rljob.dev/job": "a", "ray.io/node-type": "head"})}) == ("n", "a")
    assert ray_pod_key({"metadata": meta()}) is None


def cluster(ready: int = 2, generation: int = 2, head: str = "True", **more: Any) -> Any:
    status = {
        "state": "ready",
        "observedGeneration": generation,
        "desiredWorkerReplicas": 2,
        "readyWorkerReplicas": ready,
        "head": {"podName": "h", "serviceName": "s"},
        "conditions": [condition("HeadPodReady", head), condition("RayClusterProvisioned"), *more.pop("also", ())],
    }
    owner = {"kind": "RLJob", "name": "a", "uid": "job", "controller": True}
    return cluster_state({"metadata": meta("a", ownerReferences=[owner]), "spec": {}, "status": status, **more})


def test_a_cluster_is_ready_when_its_pods_are_now() -> None:
    assert cluster().view.ready
    for not_ready in (cluster(ready=1), cluster(generation=1), cluster(head="False")):
        assert not not_ready.view.ready
    assert not cluster().view.suspended
    suspended = [cluster(spec={"suspend": True})]
    suspended += [cluster(also=[condition(kind)]) for kind in ("RayClusterSuspending", "RayClusterSuspended")]
    for state in suspended:
        assert (state.view.ready, state.view.suspended) == (False, True)
    failed = cluster(also=[condition("ReplicaFailure", message="quota")])
    assert failed.view.failure == "quota"


def test_a_cluster_belongs_to_the_job_with_its_controllers_uid() -> None:
    assert cluster().for_job("job").owned
    assert cluster().for_job("job").owner == ""
    theirs = cluster().for_job("another")
    assert (theirs.owned, theirs.owner) == (False, "RLJob a")
    nobodys = cluster_state({"metadata": meta("a")})
    assert (nobodys.for_job("").owned, nobodys.view.owner, nobodys.view.answered) == (False, "", False)


def test_rays_token_secret() -> None:
    assert cluster().token_secret == ""
    assert cluster(spec={"authOptions": {"mode": "token"}}).token_secret == "a"
    assert cluster(spec={"authOptions": {"mode": "token", "secretName": "s"}}).token_secret == "s"


OWNED = {"ownerReferences": [{"kind": "RayCluster", "name": "a", "uid": "c", "controller": True}]}


@pytest.mark.parametrize(
    ("conditions", "admitted", "reason"),
    [
        ([], False, ""),
        ([condition("QuotaReserved", "False", "Pending")], False, "Pending"),
        ([condition("QuotaReserved"), condition("Admitted", "False", "NoChecks")], False, "NoChecks"),
        ([condition("QuotaReserved"), condition("Admitted")], True, "R"),
        (
            [condition("Evicted", reason="Preempted"), condition("QuotaReserved", "False", "Pending")],
            False,
            "Preempted",
        ),
    ],
)
def test_kueues_workload(conditions: list[dict[str, Any]], admitted: bool, reason: str) -> None:
    item = {"metadata": meta("w", **OWNED), "status": {"conditions": conditions}}
    state = workload_state(item)
    assert (state.view.admitted, state.view.reason, state.cluster_uid) == (admitted, reason, "c")
    assert queue_key(item) == ("n", "a")
    assert queue_key({"metadata": meta("w")}) is None


def test_what_kueue_was_told_is_read_back() -> None:
    boost = {"kueue.x-k8s.io/priority-boost": "4", "rljob.dev/last-checkpoint": TIME}
    item = {"metadata": meta("w", **OWNED, annotations=boost)}
    assert workload_state(item).view.workload == WorkloadView("w", "u", "4", TIME)
    assert workload_state({"metadata": meta("w")}).view.workload == WorkloadView("w", "u")


@pytest.mark.parametrize(
    ("phase", "blocked", "admitted", "reason"),
    [
        ("Pending", False, False, "Pending"),
        ("Inqueue", True, False, "NotEnoughResources"),
        ("Inqueue", False, True, ""),
        ("Running", True, True, ""),
    ],
)
def test_volcanos_pod_group(phase: str, blocked: bool, admitted: bool, reason: str) -> None:
    unschedulable = [condition("Unschedulable", reason="NotEnoughResources")] if blocked else []
    view = pod_group_state({"metadata": meta("g", **OWNED), "status": {"phase": phase, "conditions": unschedulable}})
    assert (view.view.admitted, view.view.reason) == (admitted, reason)
