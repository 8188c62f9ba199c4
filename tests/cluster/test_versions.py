"""Versions of KubeRay, of the operator and of its CRD: each that is supported, and replaced while a job runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from control_plane import KUBERAY_VERSIONS, ControlPlane
from kube import wait_until
from kwok_cluster import KwokCluster
from operator_process import REPOSITORY
from ray_driver import Attempt
from ray_standin import RayStandIn
from scenarios import Case
from support.samples import unless_all, unless_drawn

pytestmark = pytest.mark.cluster
OFTEN = {"status_seconds": "0.5"}
"""Seconds between writes of a running job's progress, short so that a test sees it soon."""
NEXT_VERSION = {
    "crds/rljob_api/spec/job.py": (
        "    suspend: bool = False\n",
        '    wishes: PositiveInt = 3\n    """A field of the next version."""\n    suspend: bool = False\n',
    ),
    "crds/rljob_api/status.py": (
        "    writes: NonNegativeInt = 0\n",
        '    verdict: Message | None = None\n    """Another one."""\n    writes: NonNegativeInt = 0\n',
    ),
    "operator/rljob_operator/state/lifecycle.py": (
        "        queue=plan.spec.scheduling.queue,\n",
        '        queue=plan.spec.scheduling.queue,\n        verdict=f"granted {plan.spec.wishes}",\n',
    ),
}
"""Changes allowed to the next version: in each file a text, and its replacement."""


def advances(case: Case) -> None:
    """Wait until the status tells of another step."""
    before = case.status().get("progress", {}).get("step", 0)
    case.wait_status(lambda status: status.get("progress", {}).get("step", 0) > before)


def uids(case: Case) -> set[str]:
    return {pod["metadata"]["uid"] for pod in case.pods()}


@pytest.mark.parametrize(
    "version",
    [
        pytest.param(
            version,
            marks=unless_all("all other tests of the control plane have it")
            if version == max(KUBERAY_VERSIONS)
            else unless_drawn(f"a life with KubeRay {version}"),
        )
        for version in sorted(KUBERAY_VERSIONS)
    ],
)
def test_a_life_with_kuberay(version: str, control_plane: ControlPlane, ray: RayStandIn) -> None:
    control_plane.use_kuberay(version)
    case = Case(control_plane, ray, None)
    operator = case.own_operator(kuberay_version=version)
    operator.start()
    case.create("steps=20", attempts=[Attempt(step_seconds=0.3), Attempt(exit_code=1), Attempt(step_seconds=0.05)])
    case.wait_status(lambda status: status.get("progress", {}).get("step", 0) >= 1)
    case.change({"suspend": True})
    case.wait("Suspended")
    assert wait_until(lambda: case.cluster() is None, 60)
    case.change({"suspend": False})
    done = case.wait("Succeeded", seconds=120)
    assert done["status"]["restarts"] == 1
    assert done["status"]["progress"]["step"] == 20
    operator.kill()
    case.close()


@unless_drawn("upgrades of KubeRay")
def test_kuberay_is_upgraded_under_a_running_job(control_plane: ControlPlane, ray: RayStandIn) -> None:
    old, new = sorted(KUBERAY_VERSIONS)
    control_plane.use_kuberay(old)
    case = Case(control_plane, ray, None)
    operator = case.own_operator(kuberay_version=old, **OFTEN)
    operator.start()
    case.create("steps=100000", attempts=[Attempt(step_seconds=0.2)])
    advances(case)
    pods = uids(case)

    control_plane.use_kuberay(new)
    advances(case)
    assert operator.stop() == 0
    operator = case.own_operator(kuberay_version=new, **OFTEN)
    operator.start()
    advances(case)
    assert uids(case) == pods
    assert (len(case.submissions()), case.status()["restarts"]) == (1, 0)

    [worker] = case.pods("worker")
    case.kube.delete("Pod", case.namespace, worker["metadata"]["name"])
    case.wait_status(lambda status: status["attempt"] == 1 and status["phase"] == "Running")
    assert len(uids(case) & pods) == 1, "the new KubeRay cares for the old one's cluster: the head is the same"
    case.change({"steps": case.status()["progress"]["step"] + 5})
    assert case.wait("Succeeded")["status"]["restarts"] == 1
    operator.kill()
    case.close()


@pytest.fixture
def next_version(tmp_path: Path) -> Path:
    """An operator with one field more in spec and status, the first of which has a default."""
    for part in ("crds", "operator"):
        shutil.copytree(REPOSITORY / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (old, new) in NEXT_VERSION.items():
        text = (tmp_path / name).read_text()
        assert text.count(old) == 1, name
        (tmp_path / name).write_text(text.replace(old, new))
    return tmp_path


def crd_of(code: Path) -> dict[str, Any]:
    """The CRD that a checkout's types make."""
    script = "import json, rljob_api.crd as api; print(json.dumps(api.custom_resource_definition()))"
    environment = {**os.environ, "PYTHONPATH": str(code / "crds")}
    text = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True).stdout
    crd: dict[str, Any] = json.loads(text)
    return crd


@unless_drawn("upgrades of the operator")
def test_operator_and_crd_are_upgraded_and_downgraded_under_a_running_job(
    control_plane: KwokCluster, ray: RayStandIn, next_version: Path
) -> None:
    control_plane.use_kuberay("1.6.2")
    case = Case(control_plane, ray, None)
    operator = case.own_operator(**OFTEN)
    operator.start()
    case.create("steps=100000", attempts=[Attempt(step_seconds=0.2)])
    advances(case)
    pods = uids(case)
    try:
        control_plane.install_crds([crd_of(next_version)])
        # The server goes over to a new schema a moment after it has it.
        case.kube.wait_for("RLJob", case.namespace, "job", lambda job: job["spec"].get("wishes") == 3)
        advances(case)
        case.create("wishes=5", name="newer")
        refused = case.wait_status(lambda status: "spec.wishes" in status.get("message", ""), "newer")
        assert refused["phase"] == "Pending"
        assert "upgrade the operator" in refused["message"]
        case.kube.delete("RLJob", case.namespace, "newer")

        assert operator.stop() == 0
        operator = case.own_operator(code=next_version, **OFTEN)
        operator.start()
        advances(case)
        assert case.status()["verdict"] == "granted 3"
        assert (uids(case), len(case.submissions())) == (pods, 1)
        ray.kill_driver(case.namespace, "job")
        case.wait_status(lambda status: status["attempt"] == 1 and status["phase"] == "Running")

        assert operator.stop() == 0
        operator = case.own_operator(**OFTEN)
        operator.start()
        advances(case)
        case.wait_status(lambda status: "No other attempt can be begun: spec.wishes" in status["message"])
        ray.kill_driver(case.namespace, "job")
        case.wait_status(lambda status: status["phase"] != "Running" and "spec.wishes" in status["message"])
        assert len(case.submissions()) == 2
    finally:
        control_plane.install_crds([crd_of(REPOSITORY)])
    # No event tells that a schema went back: the operator sees it when it reads the jobs anew, after a minute or two.
    case.wait_status(lambda status: status["attempt"] == 2 and status["phase"] == "Running", seconds=200)
    assert uids(case) == pods
    case.change({"steps": case.status()["progress"]["step"] + 5})
    assert case.wait("Succeeded")["status"]["restarts"] == 2
    operator.kill()
    case.close()
