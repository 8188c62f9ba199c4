"""The chart on a real API server: accepted, installed, upgraded, uninstalled; and its rights are enough."""

from __future__ import annotations

from typing import Any

import pytest
from control_plane import ControlPlane, unique
from helm_chart import CHART, MODES, of_kind, render
from kube import Kube
from operator_process import OperatorProcess
from ray_driver import Attempt
from ray_standin import RayStandIn
from scenarios import Case
from small_jobs import small_job
from support.samples import unless_drawn

pytestmark = pytest.mark.cluster
NOT_INSTALLED = ("ServiceMonitor", "PrometheusRule")
RIGHTS = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")


@pytest.mark.parametrize("mode", MODES)
def test_the_api_server_accepts_every_object(kube: Kube, namespace: str, mode: str) -> None:
    watched = MODES[mode].get("watchNamespaces", [])
    values = {**MODES[mode], **({"watchNamespaces": [namespace]} if watched else {})}
    accepted = set()
    for item in render(values, namespace=namespace):
        if item["kind"] not in NOT_INSTALLED:
            accepted.add(kube.apply(item, dryRun="All", fieldValidation="Strict")["kind"])
    assert {"Deployment", "Service"} <= accepted


def test_installed_upgraded_and_uninstalled_without_losing_a_job(
    control_plane: ControlPlane, kube: Kube, namespace: str
) -> None:
    release = ("rljob", f"--namespace={namespace}")
    mounted = "--set=policy.hostPaths={/shared}"
    control_plane.helm("install", *release, str(CHART), "--take-ownership", mounted)
    crd = kube.get("CustomResourceDefinition", None, "rljobs.rljob.dev")
    assert crd["metadata"]["annotations"]["meta.helm.sh/release-namespace"] == namespace
    kube.create(small_job(namespace))
    deployment = kube.path("apps/v1/Deployment", namespace)
    budget = kube.path("policy/v1/PodDisruptionBudget", namespace)
    assert [item["spec"]["replicas"] for item in kube.request("GET", deployment)["items"]] == [1]
    assert kube.request("GET", budget)["items"] == []
    control_plane.helm("upgrade", *release, str(CHART), "--set=replicas=2", mounted)
    assert [item["spec"]["replicas"] for item in kube.request("GET", deployment)["items"]] == [2]
    assert len(kube.request("GET", budget)["items"]) == 1
    control_plane.helm("uninstall", *release)
    assert kube.request("GET", deployment)["items"] == []
    left = kube.get("CustomResourceDefinition", None, "rljobs.rljob.dev")
    assert "deletionTimestamp" not in left["metadata"]
    assert left["metadata"]["uid"] == crd["metadata"]["uid"]
    assert kube.find("RLJob", namespace, "job")


def operator_with_the_charts_rights(case: Case, namespaced: bool) -> OperatorProcess:
    """An operator that is the chart's service account; it runs in the case's namespace, as its Lease does."""
    name = unique("rights")
    values: dict[str, Any] = {"fullnameOverride": name, "watchNamespaces": [case.namespace] if namespaced else []}
    objects = render(values, namespace=case.namespace)
    for kind in RIGHTS:
        for item in of_kind(objects, kind):
            case.kube.apply(item)
    token = case.control_plane.token_of(case.namespace, name)
    settings = {"operator_namespace": case.namespace, "lease_name": name}
    return OperatorProcess(
        case.control_plane, case.ray, case.namespace if namespaced else None, token=token, settings=settings
    )


@pytest.mark.parametrize(
    "namespaced",
    [
        pytest.param(namespaced, marks=unless_drawn(f"the chart's rights: {name}"), id=name)
        for namespaced, name in ((True, "some namespaces"), (False, "all namespaces"))
    ],
)
def test_the_charts_rights_are_enough_for_all_that_the_operator_does(
    control_plane: ControlPlane, ray: RayStandIn, namespaced: bool
) -> None:
    control_plane.use_kuberay("1.6.2")
    case = Case(control_plane, ray, None)
    operator = operator_with_the_charts_rights(case, namespaced)
    operator.start()
    case.create("steps=100000", name="long", attempts=[Attempt(step_seconds=0.2), Attempt(step_seconds=0.2)])
    case.create("steps=2", "ttlSecondsAfterFinished=1", name="short")
    case.wait("Running", name="long")
    case.change({"suspend": True}, name="long")
    case.wait("Suspended", name="long")
    case.kube.wait_gone("RayCluster", case.namespace, "long")
    case.change({"suspend": False}, name="long")
    case.wait("Running", name="long")
    case.kube.wait_gone("RLJob", case.namespace, "short")
    assert case.events("long")
    assert operator.stop() == 0
    log = operator.process.log.read_text(errors="replace")
    assert "orbidden" not in log, operator.process.tail()
    lease = case.kube.list("Lease", case.namespace)
    assert [item["spec"].get("holderIdentity") or "" for item in lease] == [""]
    case.close()
