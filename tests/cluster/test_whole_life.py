"""The life of a job on a real control plane with KubeRay."""

from __future__ import annotations

import json

import pytest
from control_plane import ControlPlane
from kube import Object, conditions, wait_until
from kwok_cluster import HOLD
from ray_driver import Attempt
from ray_standin import RayStandIn
from scenarios import Case, Running, Scenarios
from support.samples import drawn

pytestmark = pytest.mark.cluster
scenario = Scenarios()
SLOW = Attempt(step_seconds=0.5)
ENDLESS = Attempt(hang_at_step=1)
ALWAYS = "from_creation_to_success"


def owners(manifest: Object) -> list[tuple[str, str]]:
    return [(owner["kind"], owner["uid"]) for owner in manifest["metadata"].get("ownerReferences", [])]


@scenario
def from_creation_to_success(case: Case) -> None:
    job = case.create("steps=4")
    done = case.wait("Succeeded")
    status = done["status"]
    assert status["progress"]["step"] == 4
    assert status["progress"]["steps"] == 4
    assert status["progress"]["rewardMean"] == pytest.approx(0.5)
    assert status["progress"]["lastStep"]["phaseSeconds"]["actor_train"] == pytest.approx(0.03)
    assert status["observedGeneration"] == job["metadata"]["generation"]
    assert status["startTime"] <= status["runningTime"] <= status["completionTime"]
    assert status.get("restarts", 0) == 0
    found = conditions(done)
    assert found["Succeeded"]["status"] == "True"
    assert found.get("Failed", {"status": "False"})["status"] == "False"
    assert found["Running"]["status"] == "False"
    uid = job["metadata"]["uid"]
    assert case.submissions() == [f"rljob-{uid}-0"]
    [attempt] = status["attempts"]
    assert attempt["number"] == 0
    assert attempt["exitCode"] == 0


@scenario
def what_is_made_belongs_to_the_job(case: Case) -> None:
    job = case.create(attempts=[ENDLESS])
    case.wait("Running")
    mine = [("RLJob", job["metadata"]["uid"])]
    made = {"RayCluster": "job", "Secret": "job-driver", "NetworkPolicy": "job-head"}
    for kind, name in made.items():
        child = case.kube.get(kind, case.namespace, name)
        assert owners(child) == mine
        assert child["metadata"]["ownerReferences"][0]["controller"] is True
        assert not child["metadata"]["ownerReferences"][0].get("blockOwnerDeletion", False)
        assert child["metadata"]["labels"]["rljob.dev/job"] == "job"
        assert child["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "rljob-operator"
        assert not child["metadata"].get("finalizers")
    for pod in case.pods():
        assert pod["metadata"]["labels"]["rljob.dev/job"] == "job"
    assert case.job()["metadata"].get("finalizers", []) == []


@scenario
def the_framework_leaves_nothing_on_objects(case: Case) -> None:
    """Kopf by itself writes annotations, finalizers and results into the status of what it watches."""
    # Of another operator that is written with Kopf: with its default settings ours would take it away.
    foreign = "kopf.zalando.org/KopfFinalizerMarker"
    case.create("steps=2", "suspend=true")
    case.wait("Suspended")
    case.kube.patch("RLJob", case.namespace, "job", {"metadata": {"finalizers": [foreign]}})
    case.change({"suspend": False})
    try:
        job = case.wait("Succeeded")
        assert job["metadata"]["finalizers"] == [foreign]
    finally:
        case.kube.patch("RLJob", case.namespace, "job", {"metadata": {"finalizers": None}})
    objects = [
        (kind, item)
        for kind in ("RLJob", "RayCluster", "Pod", "NetworkPolicy", "Secret", "Event")
        for item in case.kube.list(kind, case.namespace)
    ]
    assert {"RLJob", "NetworkPolicy", "Secret", "Event"} <= {kind for kind, _ in objects}
    for _, item in objects:
        ours = [field for field in item["metadata"]["managedFields"] if "rljob" in field["manager"]]
        text = json.dumps({**item, "metadata": {**item["metadata"], "managedFields": ours}})
        assert "kopf" not in text.replace(foreign, "").lower(), text


@scenario
def phases_come_in_order(case: Case) -> None:
    seen: list[str] = []
    # Longer than the operator's pause between two looks at a driver that starts.
    case.create("steps=12", f"pods.annotations={{{HOLD}: 'yes'}}", attempts=[SLOW])
    case.wait("Starting", "Queued")
    for _ in case.pods():
        assert case.status()["phase"] in ("Queued", "Starting")
    assert wait_until(lambda: len(case.pods()) >= 1, 30)
    assert case.status()["phase"] != "Running"
    release(case)
    for _ in range(4000):
        now = case.status()["phase"]
        if not seen or seen[-1] != now:
            seen.append(now)
        if now == "Succeeded":
            break
        wait_until(lambda now=now: case.status()["phase"] != now, 60)  # type: ignore[misc]
    assert seen[-1] == "Succeeded"
    order = ["Pending", "Queued", "Starting", "Running", "Succeeded"]
    assert [order.index(one) for one in seen] == sorted(order.index(one) for one in seen)
    assert "Running" in seen


def release(case: Case) -> None:
    """Let the held pods start, those of later attempts too."""

    def all_free() -> bool:
        for pod in case.pods():
            if HOLD in pod["metadata"].get("annotations", {}):
                name = pod["metadata"]["name"]
                case.kube.patch("Pod", case.namespace, name, {"metadata": {"annotations": {HOLD: None}}})
        pods = case.pods()
        return bool(pods) and all(pod["status"].get("phase") == "Running" for pod in pods)

    assert wait_until(all_free, 60)


@scenario
def suspended_and_resumed(case: Case) -> None:
    case.create("steps=200", attempts=[SLOW, Attempt(step_seconds=0.01)])
    case.wait_status(lambda status: status.get("progress", {}).get("step", 0) >= 2)
    first = case.wait_cluster()
    case.change({"suspend": True})
    suspended = case.wait("Suspended")
    assert wait_until(lambda: case.cluster() is None and not case.pods(), 60), case.children()
    assert conditions(suspended)["Suspended"]["status"] == "True"
    saved = case.ray.run_of(suspended["metadata"]["uid"]).saved_step
    assert saved is not None
    assert saved >= 2
    assert suspended["status"].get("restarts", 0) == 0
    case.change({"suspend": False, "steps": saved + 3})
    done = case.wait("Succeeded")
    assert done["status"].get("restarts", 0) == 0
    assert done["status"]["progress"]["step"] == saved + 3
    uid = done["metadata"]["uid"]
    assert case.submissions() == [f"rljob-{uid}-0", f"rljob-{uid}-1"]
    assert [record["rerun"] for record in case.ray.run_of(uid).records] == [False] * (saved + 3)
    second = case.cluster()
    assert second is None or second["metadata"]["uid"] != first["metadata"]["uid"]


@scenario
def suspended_from_the_start(case: Case) -> None:
    case.create("suspend=true")
    case.wait("Suspended")
    assert case.cluster() is None
    assert case.submissions() == []
    case.change({"suspend": False})
    case.wait("Succeeded")


@scenario
def suspended_while_starting(case: Case) -> None:
    case.create(f"pods.annotations={{{HOLD}: 'yes'}}")
    case.wait("Starting", "Queued")
    case.wait_cluster()
    case.change({"suspend": True})
    case.wait("Suspended")
    assert wait_until(lambda: case.cluster() is None, 30)
    assert case.submissions() == []


@scenario
def a_driver_that_ignores_the_stop_does_not_keep_the_devices(case: Case) -> None:
    case.create("steps=100", attempts=[Attempt(step_seconds=0.2, stop_seconds=3600), Attempt()])
    case.wait("Running")
    case.change({"suspend": True})
    case.wait("Suspended", seconds=120)
    assert wait_until(lambda: case.cluster() is None, 30)


@scenario
def deleted_after_its_time_to_live(case: Case) -> None:
    case.create("ttlSecondsAfterFinished=3")
    case.wait("Succeeded")
    case.kube.wait_gone("RLJob", case.namespace, "job", 60)
    case.wait_no_children()


@scenario
def a_failed_job_is_deleted_after_its_time_to_live_too(case: Case) -> None:
    case.create("ttlSecondsAfterFinished=2", "failurePolicy.maxRestarts=0", attempts=[Attempt(exit_code=1)])
    case.kube.wait_gone("RLJob", case.namespace, "job", 90)
    case.wait_no_children()


@scenario
def fails_past_its_deadline(case: Case) -> None:
    case.create("steps=1000", "activeDeadlineSeconds=3", attempts=[SLOW])
    failed = case.wait("Failed", seconds=120)
    assert "activeDeadlineSeconds" in conditions(failed)["Failed"]["message"]
    assert wait_until(lambda: not case.pods(), 60), "the devices are given back"


@scenario
def the_devices_are_given_back_at_the_end(case: Case) -> None:
    case.create()
    case.wait("Succeeded")
    assert wait_until(lambda: case.cluster() is None and not case.pods(), 60), case.children()


@scenario
def a_checkpoint_is_made_when_it_is_asked_for(case: Case) -> None:
    job = case.create("checkpoint.everySteps=1000", "steps=1000", attempts=[SLOW])
    case.wait("Running")
    run = case.ray.run_of(job["metadata"]["uid"])
    annotation = {"metadata": {"annotations": {"rljob.dev/checkpoint-requested": "one"}}}
    case.kube.patch("RLJob", case.namespace, "job", annotation)
    case.wait_status(lambda status: status.get("checkpointRequest", {}).get("value") == "one")
    assert run.checkpoints_requested == 1
    annotation["metadata"]["annotations"]["rljob.dev/checkpoint-requested"] = "two"
    case.kube.patch("RLJob", case.namespace, "job", annotation)
    case.wait_status(lambda status: status.get("checkpointRequest", {}).get("value") == "two")
    assert run.checkpoints_requested == 2


@scenario
def more_steps_than_at_first(case: Case) -> None:
    case.create("steps=3", attempts=[Attempt(step_seconds=2.0), Attempt(step_seconds=0.05)])
    case.wait("Running")
    case.change({"steps": 6})
    done = case.wait("Succeeded")
    assert done["status"]["progress"]["step"] == 6


@scenario
def several_workers(case: Case) -> None:
    case.create("resources.nodes=3", "rollout.samplesPerPrompt=3", attempts=[SLOW])
    case.wait("Succeeded")
    uid = case.job()["metadata"]["uid"]
    assert case.submissions() == [f"rljob-{uid}-0"]


# --- deletion in each phase --------------------------------------------------------------------


def delete_and_see_nothing_left(case: Case) -> None:
    case.kube.delete("RLJob", case.namespace, "job")
    case.kube.wait_gone("RLJob", case.namespace, "job")
    case.wait_no_children()


@scenario
def deleted_at_once(case: Case) -> None:
    case.create()
    delete_and_see_nothing_left(case)


@scenario
def deleted_while_queued(case: Case) -> None:
    case.create("scheduling.nodeSelector={nowhere: here}")
    case.wait("Queued")
    assert wait_until(lambda: case.pods(), 60)
    delete_and_see_nothing_left(case)


@scenario
def deleted_while_starting(case: Case) -> None:
    case.create(f"pods.annotations={{{HOLD}: 'yes'}}")
    case.wait("Starting")
    delete_and_see_nothing_left(case)


@scenario
def deleted_while_running(case: Case) -> None:
    case.create(attempts=[ENDLESS])
    case.wait("Running")
    delete_and_see_nothing_left(case)


@scenario
def deleted_while_suspended(case: Case) -> None:
    case.create("suspend=true")
    case.wait("Suspended")
    delete_and_see_nothing_left(case)


@scenario
def deleted_after_success(case: Case) -> None:
    case.create()
    case.wait("Succeeded")
    delete_and_see_nothing_left(case)


@scenario
def deleted_after_failure(case: Case) -> None:
    case.create("failurePolicy.maxRestarts=0", attempts=[Attempt(exit_code=1)])
    case.wait("Failed")
    delete_and_see_nothing_left(case)


@scenario
def deleted_and_made_anew_under_the_same_name(case: Case) -> None:
    first = case.create(attempts=[ENDLESS])
    case.wait("Running")
    case.kube.delete("RLJob", case.namespace, "job")
    case.ray.script(case.namespace, "job", Attempt())
    second = case.create()
    done = case.wait("Succeeded")
    assert done["metadata"]["uid"] == second["metadata"]["uid"] != first["metadata"]["uid"]
    assert case.submissions() == [f"rljob-{job['metadata']['uid']}-0" for job in (first, second)]


@pytest.mark.parametrize("name", [ALWAYS, *drawn("lives", [name for name in scenario.functions if name != ALWAYS], 7)])
def test_life(name: str, running: Running) -> None:
    running.result(name)


def test_deletion_does_not_need_the_operator(control_plane: ControlPlane, ray: RayStandIn) -> None:
    control_plane.use_kuberay("1.6.2")
    case = Case(control_plane, ray, None)
    operator = case.own_operator()
    operator.start()
    case.create(attempts=[ENDLESS])
    case.wait("Running")
    operator.kill()
    delete_and_see_nothing_left(case)
    case.close()
