"""An API server's refusals reach a job's user, and a manifest that is applied again changes nothing."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube import ApiError, Kube, Object
from kwok_cluster import KwokCluster
from programs import program
from ray_standin import RayStandIn
from scenarios import Case
from small_jobs import small_job

from rljob_operator.plugin.main import main
from rljob_operator.plugin.observe import parse_job
from rljob_operator.render import RenderSettings, render_cluster
from rljob_operator.state.refusals import refusal

pytestmark = pytest.mark.cluster


@contextmanager
def made(kube: Kube, *objects: Object) -> Iterator[None]:
    """Cluster-wide objects that go at the end."""
    try:
        for item in objects:
            kube.create(item)
        yield
    finally:
        for item in objects:
            kube.delete(item["kind"], None, item["metadata"]["name"])


def webhook(namespace: str) -> Object:
    """A webhook on RayClusters whose service is not there."""
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": f"gone-{namespace}"},
        "webhooks": [
            {
                "name": "gone.example.com",
                "failurePolicy": "Fail",
                "sideEffects": "None",
                "admissionReviewVersions": ["v1"],
                "timeoutSeconds": 2,
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
                "clientConfig": {"service": {"name": "gone", "namespace": "default", "path": "/check"}},
                "rules": [
                    {
                        "apiGroups": ["ray.io"],
                        "apiVersions": ["*"],
                        "operations": ["CREATE"],
                        "resources": ["rayclusters"],
                    }
                ],
            }
        ],
    }


def label_policy(namespace: str) -> tuple[Object, Object]:
    """A policy that asks for a label on every RayCluster."""
    rule = {"apiGroups": ["ray.io"], "apiVersions": ["*"], "operations": ["CREATE"], "resources": ["rayclusters"]}
    has_label = "has(object.metadata.labels) && 'cost-centre' in object.metadata.labels"
    policy: Object = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": f"label-{namespace}"},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [rule]},
            "validations": [{"expression": has_label, "message": "The label cost-centre is missing."}],
        },
    }
    binding: Object = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": f"label-{namespace}"},
        "spec": {
            "policyName": f"label-{namespace}",
            "validationActions": ["Deny"],
            "matchResources": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}},
        },
    }
    return policy, binding


@pytest.fixture
def case(control_plane: KwokCluster, ray: RayStandIn) -> Iterator[Case]:
    """A case with an operator of its own."""
    control_plane.use_kuberay("1.6.2")
    case = Case(control_plane, ray, None)
    operator = case.own_operator()
    operator.start()
    yield case
    operator.kill()
    case.close()


def why(case: Case) -> dict[str, Any]:
    """`kubectl rljob why` about the job."""
    out = io.StringIO()
    options = ("-n", case.namespace, "--kubeconfig", str(case.control_plane.admin), "-o", "json")
    with redirect_stdout(out):
        assert case.control_plane.network.run(lambda: main(["why", "job", *options])) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def told(case: Case, words: str, reason: str) -> None:
    """Wait until status, event and `why` have the words."""
    status = case.wait_status(lambda status: words in status.get("message", ""))
    assert status["phase"] == "Queued"
    assert why(case)["reason"] == reason
    assert words in why(case)["message"]
    assert [text for text in case.events() if text.startswith("RequestRefused") and words in text]


def test_a_webhook_that_does_not_answer_is_named_until_it_is_gone(case: Case) -> None:
    with made(case.kube, webhook(case.namespace)):
        case.create("steps=2")
        told(case, 'failed calling webhook "gone.example.com"', "WebhookFailing")
        assert case.cluster() is None
    case.wait("Succeeded")
    assert "webhook" not in case.status().get("message", "")


def test_a_policy_is_quoted_and_the_label_that_it_asks_for_can_be_set(case: Case) -> None:
    with made(case.kube, *label_policy(case.namespace)):
        # A policy takes effect a moment after it was made.
        case.create("steps=2", "suspend=true")
        case.wait("Suspended")
        probe = render_cluster(parse_job(case.job()), RenderSettings(kuberay_version=(1, 6, 2)))
        case.kube.wait_for("Namespace", None, case.namespace, lambda _: _is_denied(case.kube, probe))
        case.change({"suspend": False})
        told(case, "The label cost-centre is missing", "AdmissionDenied")
        case.kube.patch("RLJob", case.namespace, "job", {"metadata": {"labels": {"cost-centre": "7"}}})
        case.wait("Succeeded")
    assert "NoEffect" not in " ".join(case.events())


def _is_denied(kube: Kube, cluster: Object) -> bool:
    try:
        kube.create(cluster, dryRun="All")
    except ApiError as error:
        return "cost-centre" in error.message
    return False


def test_kueues_label_is_on_the_cluster(case: Case) -> None:
    case.create("steps=2", 'metadata.labels={"kueue.x-k8s.io/queue-name": team-queue}')
    cluster = case.wait_cluster()
    assert cluster["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-queue"
    assert case.wait_status(lambda status: status.get("queue"))["queue"] == "team-queue"


def test_a_field_that_the_crd_does_not_have_is_refused_by_name(kube: Kube, namespace: str) -> None:
    job = kube.create(small_job(namespace))
    cluster = render_cluster(parse_job(job), RenderSettings(kuberay_version=(1, 6, 2)))
    kube.create(cluster, dryRun="All", fieldValidation="Strict")
    cluster["spec"]["ofANewerKubeRay"] = {"mode": "token"}
    with pytest.raises(ApiError) as error:
        kube.create(cluster, dryRun="All", fieldValidation="Strict")
    found = refusal("Making the RayCluster failed", error.value.message)
    assert found.reason == "FieldUnknown"
    assert "spec.ofANewerKubeRay" in found.message


def applied(control_plane: KwokCluster, file: Path, *options: str) -> str:
    command = [str(program("kubectl")), "apply", "-f", str(file), f"--kubeconfig={control_plane.admin}", *options]
    return control_plane.execute(*command, environment={"HOME": str(file.parent)})


def test_a_manifest_that_is_applied_again_is_unchanged_by_any_manager(
    control_plane: KwokCluster, namespace: str, tmp_path: Path
) -> None:
    settings = (
        "records={trackers: [{name: wandb}]}",
        "scheduling={tolerations: [{key: a, operator: Exists}]}",
        "evaluation={sets: [{name: held, synthetic: {}}]}",
    )
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(small_job(namespace, "job", *settings)))
    assert "created" in applied(control_plane, file)
    assert "unchanged" in applied(control_plane, file)
    applied(control_plane, file, "--server-side", "--field-manager=gitops")
    assert "unchanged" in applied(control_plane, file)


def test_two_managers_have_volumes_of_their_own(kube: Kube, namespace: str) -> None:
    mine = small_job(namespace, "job", "suspend=true")
    kube.apply(mine, "mine")
    other = {"name": "more", "mountPath": "/more", "claim": "more"}
    theirs = {**mine, "spec": {"storage": {"volumes": [other]}}}
    kube.apply(theirs, "theirs")
    volumes = kube.apply(mine, "mine")["spec"]["storage"]["volumes"]
    assert sorted(volume["name"] for volume in volumes) == ["more", "shared"]
