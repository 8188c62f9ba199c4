"""Names, labels and strings that someone made up to break things: they harm neither the operator nor other jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from control_plane import ControlPlane
from kube import ApiError
from operator_process import OperatorProcess
from ray_standin import RayStandIn
from scenarios import Case
from small_jobs import small_job

pytestmark = pytest.mark.cluster

HUGE = "x" * 200_000
STRANGE = "\u202e\U0001f600'\"`$(reboot)\n\t{{ .Values }}%s%n</script>\x1b[2J"


@pytest.fixture(scope="module")
def operator(control_plane: ControlPlane, ray: RayStandIn) -> Iterator[OperatorProcess]:
    control_plane.use_kuberay("1.6.2")
    operator = OperatorProcess(control_plane, ray, None)
    operator.start()
    yield operator
    operator.kill()


def hostile_jobs(namespace: str) -> list[dict[str, Any]]:
    """Jobs that the API server takes, however odd they are."""
    longest = small_job(namespace, "a" + "-" * 45 + "z")
    labelled = small_job(namespace, "labelled")
    labelled["metadata"] |= {
        "labels": {"ray.io/cluster": "job", "rljob.dev/job": "job", "app.kubernetes.io/managed-by": "somebody"},
        "annotations": {"rljob.dev/checkpoint-requested": HUGE, "strange": STRANGE},
    }
    return [
        longest,
        labelled,
        small_job(namespace, "true", "reward={python: 'a.b:c'}"),
        small_job(namespace, "null", f"environment.variables={{HUGE: {HUGE[:60_000]}}}"),
        small_job(namespace, "huge", f"pods.annotations={{huge: {HUGE}}}"),
        small_job(namespace, "labels", "pods.labels={'not a label': 'nor a value!'}"),
        small_job(namespace, "reserved", "pods.labels={ray.io/cluster: job, rljob.dev/job: job}"),
        small_job(namespace, "template", "pods.head={spec: {containers: {this: is, no: list}}}"),
        small_job(namespace, "no-pod", "pods.head={spec: 7}", "pods.worker={metadata: []}"),
        small_job(namespace, "image", "image='not an image\\nat all'"),
        small_job(namespace, "variables", "environment.variables={'A=B': x, '': y}"),
        small_job(namespace, "mount", "storage.volumes=[{name: v, mountPath: /../../etc, hostPath: /}]"),
        {**small_job(namespace, "strange"), "spec": {**small_job(namespace)["spec"], "image": STRANGE}},
    ]


def test_hostile_jobs_harm_nobody_else(control_plane: ControlPlane, ray: RayStandIn, operator: OperatorProcess) -> None:
    case = Case(control_plane, ray, operator)
    taken: list[str] = []
    refused: dict[str, int] = {}
    for job in hostile_jobs(case.namespace):
        try:
            case.kube.create(job)
            taken.append(job["metadata"]["name"])
        except ApiError as error:
            refused[job["metadata"]["name"]] = error.code
    assert len(taken) >= 10, refused
    assert set(refused.values()) <= {400, 413, 422}
    case.create()
    case.wait("Succeeded", seconds=120)
    assert operator.process.running
    for name in taken:
        job = case.kube.wait_for(
            "RLJob", case.namespace, name, lambda job: job.get("status", {}).get("phase"), seconds=60
        )
        status = job["status"]
        if status["phase"] == "Pending":
            assert status.get("message"), name
    case.close()


def test_a_spec_that_cannot_be_rendered_is_told_by_its_field(
    control_plane: ControlPlane, ray: RayStandIn, operator: OperatorProcess
) -> None:
    case = Case(control_plane, ray, operator)
    case.create("pods.labels={'not a label': x}")
    status = case.wait_status(lambda status: status.get("message"))
    assert "spec.pods.labels" in status["message"]
    assert any(condition["reason"] == "InvalidSpec" for condition in status["conditions"])
    assert case.cluster() is None
    case.close()


def test_jobs_of_the_same_name_in_two_namespaces(
    control_plane: ControlPlane, ray: RayStandIn, operator: OperatorProcess
) -> None:
    cases = [Case(control_plane, ray, operator) for _ in range(2)]
    jobs = [case.create("steps=2") for case in cases]
    for case, job in zip(cases, jobs):
        case.wait("Succeeded")
        assert case.submissions() == [f"rljob-{job['metadata']['uid']}-0"]
        case.close()


def test_a_status_that_somebody_garbled_is_put_right(
    control_plane: ControlPlane, ray: RayStandIn, operator: OperatorProcess
) -> None:
    case = Case(control_plane, ray, operator)
    case.create("suspend=true")
    case.wait("Suspended")
    case.kube.patch("RLJob", case.namespace, "job", {"status": None}, "status")
    case.wait("Suspended")
    case.change({"suspend": False})
    case.wait("Succeeded")
    case.close()
