"""The same life under each KubeRay that is supported."""

from __future__ import annotations

import pytest
from control_plane import KUBERAY_VERSIONS, ControlPlane
from kube import wait_until
from ray_driver import Attempt
from ray_standin import RayStandIn
from scenarios import Case

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("version", sorted(KUBERAY_VERSIONS))
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
