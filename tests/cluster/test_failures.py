"""Failures of a job's pods and drivers, and the failure policy's decisions."""

from __future__ import annotations

from itertools import pairwise

import pytest
from control_plane import unique
from kube import Object, conditions, wait_until
from kwok_cluster import LOST
from ray_driver import Attempt
from scenarios import Case, Running, Scenarios
from support.samples import drawn

pytestmark = pytest.mark.cluster
scenario = Scenarios()
FAILS = Attempt(exit_code=1, fail_at_step=2, log=("Traceback ...", "RuntimeError: out of luck"))
WORKS = Attempt()
HANGS = Attempt(step_seconds=0.5, hang_at_step=8)
"""It does not end before the test has done something to it, however slow the machine is."""


def attempts(job: Object) -> list[Object]:
    return sorted(job["status"]["attempts"], key=lambda attempt: int(attempt["number"]))


@scenario
def a_failed_driver_is_restarted_in_place(case: Case) -> None:
    job = case.create("steps=5", attempts=[FAILS, Attempt(step_seconds=2.0)])
    case.wait("Running")
    cluster, pods = case.wait_cluster(), {pod["metadata"]["uid"] for pod in case.pods()}
    case.wait_status(lambda status: status.get("attempt") == 1)
    again = case.wait_cluster()
    assert again["metadata"]["uid"] == cluster["metadata"]["uid"]
    assert {pod["metadata"]["uid"] for pod in case.pods()} == pods
    done = case.wait("Succeeded")
    uid = job["metadata"]["uid"]
    assert case.submissions() == [f"rljob-{uid}-0", f"rljob-{uid}-1"]
    assert done["status"]["restarts"] == 1
    first, second = attempts(done)
    assert first["exitCode"] == 1
    assert first["reason"] == "DriverExited"
    assert first["counted"] is True
    assert "RuntimeError: out of luck" in first["lastLogLines"]
    assert second["exitCode"] == 0
    records = case.ray.run_of(uid).records
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5], "continued from the checkpoint"


@scenario
def too_many_restarts(case: Case) -> None:
    case.create("failurePolicy.maxRestarts=2", attempts=[Attempt(exit_code=3)])
    failed = case.wait("Failed")
    assert len(case.submissions()) == 3
    assert failed["status"]["restarts"] == 2
    assert [attempt["exitCode"] for attempt in attempts(failed)] == [3, 3, 3]
    message = conditions(failed)["Failed"]["message"]
    assert "exit code 3" in message
    assert "all 2 restarts are used" in message


@scenario
def no_restart_is_allowed(case: Case) -> None:
    case.create("failurePolicy.maxRestarts=0", attempts=[FAILS, WORKS])
    case.wait("Failed")
    assert len(case.submissions()) == 1


@scenario
def a_rule_by_exit_code_fails_the_job(case: Case) -> None:
    rules = "failurePolicy.rules=[{name: broken-data, exitCodes: [17], action: Fail}]"
    case.create(rules, attempts=[Attempt(exit_code=17), WORKS])
    failed = case.wait("Failed")
    assert len(case.submissions()) == 1
    assert "broken-data" in conditions(failed)["Failed"]["message"]


@scenario
def a_rule_for_another_exit_code_does_not_match(case: Case) -> None:
    rules = "failurePolicy.rules=[{exitCodes: [17, 18], action: Fail}]"
    case.create(rules, attempts=[Attempt(exit_code=19), WORKS])
    case.wait("Succeeded")
    assert len(case.submissions()) == 2


@scenario
def a_rule_that_ignores_does_not_count(case: Case) -> None:
    rules = "failurePolicy.rules=[{exitCodes: [42], action: Ignore}]"
    case.create(rules, "failurePolicy.maxRestarts=0", attempts=[Attempt(exit_code=42)] * 3 + [WORKS])
    done = case.wait("Succeeded")
    assert done["status"].get("restarts", 0) == 0
    assert len(case.submissions()) == 4
    assert [attempt.get("counted", False) for attempt in attempts(done)] == [False] * 4


@scenario
def the_first_rule_that_matches_decides(case: Case) -> None:
    rules = "failurePolicy.rules=[{exitCodes: [5], action: Restart}, {exitCodes: [5], action: Fail}, {action: Fail}]"
    case.create(rules, attempts=[Attempt(exit_code=5), Attempt(exit_code=6), WORKS])
    failed = case.wait("Failed")
    assert [attempt["exitCode"] for attempt in attempts(failed)] == [5, 6]


@scenario
def a_rule_by_reason_fails_the_job(case: Case) -> None:
    rules = "failurePolicy.rules=[{reasons: [DriverExited], action: Fail}]"
    case.create(rules, attempts=[FAILS, WORKS])
    case.wait("Failed")
    assert len(case.submissions()) == 1


@scenario
def a_user_error_is_not_tried_again(case: Case) -> None:
    case.create(attempts=[Attempt(exit_code=2, log=("spec.data.path: there is no such file",)), WORKS])
    failed = case.wait("Failed")
    assert len(case.submissions()) == 1
    assert "spec.data.path: there is no such file" in conditions(failed)["Failed"]["message"]


@scenario
def a_phase_past_its_deadline_has_its_reason(case: Case) -> None:
    case.create(attempts=[Attempt(exit_code=4, log=("PhaseDeadlineError: rollout took longer than 5 s",)), WORKS])
    done = case.wait("Succeeded")
    assert attempts(done)[0]["reason"] == "PhaseTimeout"
    assert "rollout" in attempts(done)[0]["message"]


@scenario
def a_killed_driver_shows_the_signal(case: Case) -> None:
    case.create("steps=30", attempts=[HANGS, WORKS])
    case.wait_status(lambda status: status.get("progress", {}).get("step", 0) >= 1)
    case.ray.kill_driver(case.namespace, "job")
    done = case.wait("Succeeded")
    assert attempts(done)[0]["exitCode"] == -9
    assert "SIGKILL" in attempts(done)[0]["message"]


@scenario
def restarts_wait_longer_each_time(case: Case) -> None:
    case.create(
        "failurePolicy={maxRestarts: 2, backoffSeconds: 3, maxBackoffSeconds: 100}",
        attempts=[Attempt(exit_code=1), Attempt(exit_code=1), WORKS],
    )
    case.wait("Succeeded", seconds=120)
    mine = (case.namespace, "job")
    starts = [when for when, key, what in case.ray.asked if (key, what) == (mine, "POST /api/jobs/")]
    assert len(starts) == 3
    waits = [after - before for before, after in pairwise(starts)]
    assert waits[0] >= 3
    assert waits[1] >= 6


@scenario
def a_lost_head_begins_anew_from_the_checkpoint(case: Case) -> None:
    job = case.create("steps=12", attempts=[HANGS, WORKS])
    case.wait_status(lambda status: status.get("progress", {}).get("step", 0) >= 2)
    [head] = case.pods("head")
    cluster = case.wait_cluster()
    case.kube.delete("Pod", case.namespace, head["metadata"]["name"], gracePeriodSeconds=0)
    done = case.wait("Succeeded", seconds=180)
    first = attempts(done)[0]
    assert first["reason"] == "HeadLost"
    assert first["counted"] is True
    assert done["status"]["restarts"] == 1
    assert case.submissions() == [f"rljob-{job['metadata']['uid']}-{number}" for number in (0, 1)]
    records = case.ray.run_of(job["metadata"]["uid"]).records
    assert [record["step"] for record in records] == list(range(1, 13)), "continued from the checkpoint"
    assert cluster["metadata"]["uid"] == done["status"]["cluster"]["uid"]


@scenario
def a_head_that_forgot_the_driver(case: Case) -> None:
    case.create("steps=12", attempts=[HANGS, WORKS])
    case.wait_status(lambda status: status.get("progress", {}).get("step", 0) >= 1)
    case.ray.forget_submissions(case.namespace, "job")
    done = case.wait("Succeeded", seconds=180)
    assert attempts(done)[0]["reason"] == "HeadLost"
    assert len(case.submissions()) == 2


@scenario
def a_rule_for_a_lost_head(case: Case) -> None:
    rules = "failurePolicy.rules=[{reasons: [HeadLost], action: Ignore}]"
    case.create("steps=12", rules, "failurePolicy.maxRestarts=0", attempts=[HANGS, WORKS])
    case.wait_status(lambda status: status.get("progress", {}).get("step", 0) >= 1)
    [head] = case.pods("head")
    case.kube.delete("Pod", case.namespace, head["metadata"]["name"], gracePeriodSeconds=0)
    done = case.wait("Succeeded", seconds=180)
    assert done["status"].get("restarts", 0) == 0


def two_workers(case: Case, *more: str) -> Object:
    job = case.create("steps=120", "resources.nodes=2", *more, attempts=[HANGS, Attempt(step_seconds=0.02)])
    case.wait_status(lambda status: status.get("progress", {}).get("step", 0) >= 1)
    return job


@scenario
def a_lost_worker_pod(case: Case) -> None:
    two_workers(case)
    before = case.wait_cluster()
    worker = case.pods("worker")[0]
    case.kube.delete("Pod", case.namespace, worker["metadata"]["name"], gracePeriodSeconds=0)
    done = case.wait("Succeeded", seconds=180)
    assert attempts(done)[0]["reason"] == "PodLost", attempts(done)[0]["message"]
    assert done["status"]["cluster"]["uid"] == before["metadata"]["uid"], "new pods, not a new cluster"


@scenario
def a_worker_that_ran_out_of_memory(case: Case) -> None:
    two_workers(case)
    worker = case.pods("worker")[0]
    terminated = {"exitCode": 137, "reason": "OOMKilled"}
    set_container_state(case, worker, {"terminated": terminated}, phase="Failed")
    done = case.wait("Succeeded", seconds=180)
    assert attempts(done)[0]["reason"] == "OutOfMemory", attempts(done)[0]["message"]
    assert "memory" in attempts(done)[0]["message"]


@scenario
def an_evicted_worker(case: Case) -> None:
    two_workers(case)
    name = case.pods("worker")[0]["metadata"]["name"]
    status = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."}
    case.kube.patch("Pod", case.namespace, name, {"status": status}, "status")
    done = case.wait("Succeeded", seconds=180)
    assert attempts(done)[0]["reason"] == "Evicted", attempts(done)[0]["message"]


def set_container_state(case: Case, pod: Object, state: Object, phase: str) -> None:
    container = {**pod["status"]["containerStatuses"][0], "ready": False, "state": state}
    status = {"phase": phase, "containerStatuses": [container]}
    case.kube.patch("Pod", case.namespace, pod["metadata"]["name"], {"status": status}, "status")


@scenario
def a_lost_node(case: Case) -> None:
    node = unique("node")
    case.control_plane.add_node(node, pool=node)
    case.control_plane.add_node(f"{node}-b", pool=node)
    two_workers(
        case,
        f"scheduling.nodeSelector={{pool: {node}}}",
        f"scheduling.tolerations=[{{key: pool, value: {node}}}]",
        "pods.worker={spec: {affinity: null}}",
    )
    lost = case.pods("worker")[0]["spec"]["nodeName"]
    case.kube.patch("Node", None, lost, {"metadata": {"annotations": {LOST: "yes"}}})
    unknown = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "Kubelet stopped."}
    case.kube.patch("Node", None, lost, {"status": {"conditions": [unknown]}}, "status")
    case.control_plane.add_node(f"{node}-c", pool=node)
    done = case.wait("Succeeded", seconds=240)
    assert attempts(done)[0]["reason"] == "NodeLost"
    for name in (node, f"{node}-b", f"{node}-c"):
        case.kube.delete("Node", None, name)


@scenario
def a_driver_that_never_gets_ready(case: Case) -> None:
    case.create(
        "timeouts.startSeconds=3",
        "failurePolicy.maxRestarts=1",
        attempts=[Attempt(start_seconds=3600), WORKS],
    )
    done = case.wait("Succeeded", seconds=240)
    assert attempts(done)[0]["reason"] == "StartTimeout"


@scenario
def someone_else_s_cluster_of_the_same_name_is_left_alone(case: Case) -> None:
    foreign = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "job", "namespace": case.namespace},
        "spec": {
            "headGroupSpec": {
                "rayStartParams": {},
                "template": {"spec": {"containers": [{"name": "ray-head", "image": "rayproject/ray:2.60.0"}]}},
            }
        },
    }
    before = case.kube.create(foreign)
    case.create()
    case.wait_status(lambda status: "RayCluster" in (status.get("message") or ""))
    wait_until(lambda: False, 3)
    after = case.wait_cluster()
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["spec"] == before["spec"]
    assert case.submissions() == []
    case.kube.delete("RayCluster", case.namespace, "job")
    case.wait("Succeeded")


@scenario
def a_deleted_cluster_is_made_anew(case: Case) -> None:
    case.create("steps=12", attempts=[HANGS, WORKS])
    case.wait_status(lambda status: status.get("progress", {}).get("step", 0) >= 1)
    first = case.wait_cluster()["metadata"]["uid"]
    case.kube.delete("RayCluster", case.namespace, "job")
    done = case.wait("Succeeded", seconds=180)
    assert done["status"]["cluster"]["uid"] != first
    assert len(case.submissions()) == 2


@pytest.mark.parametrize("name", drawn("failures", list(scenario.functions), 8))
def test_failure(name: str, running: Running) -> None:
    running.result(name)
