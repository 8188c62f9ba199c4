"""Claims of sandboxes on a real API server with agent-sandbox's own kind; the test plays its controller."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube import Kube, Object, wait_until
from kwok_cluster import KwokCluster
from operator_process import OperatorProcess
from ray_standin import RayStandIn
from scenarios import PHASE_SECONDS, Case

pytestmark = pytest.mark.cluster

KIND = "extensions.agents.x-k8s.io/v1beta1/SandboxClaim"
NAMES = ["job-sandbox-0", "job-sandbox-1"]
POOL = (
    "reward={name: code, args: {kind: Calls, tests: tests}}",
    "sandbox={isolation: Service, service: {warmPool: {name: pool, count: 2}}}",
)


@pytest.fixture(scope="module")
def sandboxes(control_plane: KwokCluster) -> Iterator[None]:
    """The kind, without the webhook that converts it."""
    crd: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("sandboxclaims.yaml").read_text())
    del crd["spec"]["conversion"]
    control_plane.install_crds([crd])
    yield
    control_plane.kube.delete("CustomResourceDefinition", None, crd["metadata"]["name"])


@pytest.fixture
def case(control_plane: KwokCluster, ray: RayStandIn) -> Iterator[Case]:
    """A case with an operator of its own that may claim."""
    control_plane.use_kuberay("1.6.2")
    case = Case(control_plane, ray, None)
    operator: OperatorProcess = case.own_operator(sandbox_claims="true")
    operator.start()
    yield case
    operator.kill()
    case.close()


def claims(case: Case) -> dict[str, Object]:
    return {item["metadata"]["name"]: item for item in case.kube.list(KIND, case.namespace)}


def bind(kube: Kube, namespace: str, name: str, address: str) -> None:
    """Write the status of a claim that has its sandbox."""
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "DependenciesReady",
        "message": "Pod is Ready",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    status = {"conditions": [ready], "sandbox": {"name": f"pool-{name}", "podIPs": [address]}}
    kube.patch(KIND, namespace, name, {"status": status}, "status")


@pytest.mark.usefixtures("sandboxes")
def test_claims_are_taken_by_the_real_kind_bound_and_released(case: Case) -> None:
    case.create("steps=2", *POOL)
    assert wait_until(lambda: sorted(claims(case)) == NAMES, PHASE_SECONDS), case.status()
    uid = case.job()["metadata"]["uid"]
    for claim in claims(case).values():
        assert claim["spec"]["warmPoolRef"] == {"name": "pool"}
        assert [owner["uid"] for owner in claim["metadata"]["ownerReferences"]] == [uid]
        assert "env" not in claim["spec"], "that would not come from the pool"
        assert "volumeClaimTemplates" not in claim["spec"], "nor that"
    assert case.submissions() == []
    for index, name in enumerate(NAMES):
        bind(case.kube, case.namespace, name, f"10.9.0.{index + 1}")
    case.wait("Succeeded")
    assert len(case.submissions()) == 1
    assert wait_until(lambda: not claims(case), PHASE_SECONDS)
