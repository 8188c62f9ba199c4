"""The administrator's policy as the API server enforces it: the chart's ValidatingAdmissionPolicy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from control_plane import unique
from helm_chart import of_kind, render
from kube import ApiError, Kube, wait_until
from kwok_cluster import KwokCluster
from manifests import manifest
from ray_standin import RayStandIn
from scenarios import Case
from small_jobs import small_job
from support.job_policy_cases import ALLOWED, GRANTS, REFUSED

pytestmark = pytest.mark.cluster
KINDS = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
ACTIVE_SECONDS = 60.0
PROBE = "pods.worker={spec: {hostIPC: true, nodeName: probe, hostPID: true, dnsPolicy: None, os: {name: linux}}}"


def job(namespace: str, *settings: str) -> dict[str, Any]:
    found = manifest(*settings)
    return {**found, "metadata": {**found["metadata"], "namespace": namespace}}


def said(kube: Kube, asked: dict[str, Any]) -> str:
    """The API server's objection to a job; empty: it accepts the job."""
    try:
        kube.create(asked, dryRun="All", fieldValidation="Strict")
    except ApiError as error:
        return f"{error.code}: {error.message}"
    return ""


@contextmanager
def enforced(kube: Kube, policy: dict[str, Any], before: str = "") -> Iterator[str]:
    """A namespace in which the chart's policy with these values holds; with a job from before it where one is named."""
    namespace = unique("policy")
    kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    if before:
        kube.create(job(namespace, before))
    values = {"fullnameOverride": "jobs", "watchNamespaces": [namespace], "policy": policy}
    made = [item for kind in KINDS for item in of_kind(render(values, namespace=namespace), kind)]
    try:
        for item in made:
            kube.apply(item)
        probe = job(namespace, PROBE)
        assert wait_until(lambda: "podFields" in said(kube, probe), ACTIVE_SECONDS, 0.2), "the policy is not enforced"
        yield namespace
    finally:
        for item in made:
            kube.delete(item["kind"], None, item["metadata"]["name"])
        kube.delete("Namespace", None, namespace)


def test_the_api_server_refuses_and_allows_what_the_operator_does(kube: Kube) -> None:
    with enforced(kube, {}) as namespace:
        wrong = []
        for setting, field, rule in REFUSED:
            answer = said(kube, job(namespace, setting))
            if f"policy.{rule} of the chart" not in answer or ".".join(field.split(".")[:2]) not in answer:
                wrong.append((setting, rule, answer))
        assert wrong == []
        assert {setting: said(kube, job(namespace, setting)) for setting in ALLOWED} == dict.fromkeys(ALLOWED, "")
        # Types of the CRD and of this policy together: nothing but the rules may stop a job.
        names = kube.request("GET", kube.path("ValidatingAdmissionPolicy"))["items"]
        assert [p["status"].get("typeChecking", {}) for p in names if namespace in p["metadata"]["name"]] == [{}]


def test_each_grant_allows_what_its_rule_refuses(kube: Kube) -> None:
    granted = {key: value for grant in GRANTS.values() for key, value in grant.items()}
    with enforced(kube, granted) as namespace:
        answers = {setting: said(kube, job(namespace, setting)) for setting, _, _ in REFUSED}
        assert {setting: answer for setting, answer in answers.items() if answer} == {}
        upwards = job(namespace, "pods.worker={spec: {volumes: [{name: a, hostPath: {path: /data/../etc}}]}}")
        assert "policy.hostPaths" in said(kube, upwards)


def test_a_job_from_before_a_rule_can_still_be_suspended(kube: Kube) -> None:
    before = "pods.serviceAccount=admin"
    with enforced(kube, {}, before) as namespace:
        assert "policy.serviceAccounts" in said(kube, job(namespace, before))
        name = job(namespace)["metadata"]["name"]
        changed = kube.patch("RLJob", namespace, name, {"spec": {"suspend": True}})
        assert changed["spec"]["suspend"] is True
        with pytest.raises(ApiError, match=r"policy\.secrets"):
            kube.patch("RLJob", namespace, name, {"spec": {"environment": {"secrets": ["s"]}}})


def test_the_operator_says_field_and_rule_on_the_job(control_plane: KwokCluster, ray: RayStandIn) -> None:
    control_plane.use_kuberay("1.6.2")
    case = Case(control_plane, ray, None)
    operator = case.own_operator(policy="{}")
    operator.start()
    try:
        case.kube.create(small_job(case.namespace))
        text = "spec.storage.volumes[0].hostPath: '/shared' is not allowed by the administrator: policy.hostPaths"
        status = case.wait_status(lambda status: text in status.get("message", ""))
        assert [c["reason"] for c in status["conditions"] if c["type"] == "Queued"] == ["InvalidSpec"]
        told = f"InvalidSpec: {text}"
        assert wait_until(lambda: any(told in event for event in case.events()), 20.0), case.events()
        assert case.kube.list("RayCluster", case.namespace) == []
    finally:
        operator.stop()
        case.close()
