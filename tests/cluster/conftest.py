"""Fixtures of the cluster tests: one control plane for all of them."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "api"))

from control_plane import ControlPlane, unique  # noqa: E402
from fault_proxy import FaultProxy  # noqa: E402
from kube import ApiError, Kube  # noqa: E402
from processes import Process  # noqa: E402
from programs import missing  # noqa: E402
from ray_standin import RayStandIn  # noqa: E402
from scenarios import Running, Scenarios, selected  # noqa: E402

CRD = HERE.parents[1] / "crds" / "rljob.dev_rljobs.yaml"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where something is missing, the tests that need the programs are skipped and say what it is."""
    mine = [item for item in items if item.get_closest_marker("cluster")]
    if mine and (reason := missing()):
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A running control plane with the RLJob CRD, without KubeRay; its folder stays when a test failed."""
    folder = Path(tempfile.mkdtemp(prefix="rljob-cluster-"))
    plane = ControlPlane(folder, [yaml.safe_load(CRD.read_text())])
    try:
        plane.start()
        yield plane
        plane.check()
    except BaseException:
        _failed.append("control plane")
        raise
    finally:
        plane.stop()
        if not _failed:
            shutil.rmtree(folder, ignore_errors=True)


_failed: list[str] = []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Name the folder with the logs in each failure."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    plane = getattr(item, "funcargs", {}).get("control_plane")
    if report.failed and plane is not None:
        _failed.append(item.nodeid)
        report.sections.append(("cluster", f"The programs' logs are in {plane.folder}"))


@pytest.fixture
def kube(control_plane: ControlPlane) -> Kube:
    """A client that may do everything."""
    control_plane.check()
    return control_plane.kube


@pytest.fixture
def namespace(kube: Kube) -> Iterator[str]:
    """A namespace of the test's own; it is deleted afterwards, which nobody waits for."""
    name = unique("test")
    kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    kube.wait_for("ServiceAccount", name, "default", lambda _: True)
    yield name
    with suppress(ApiError):
        kube.request("DELETE", kube.path("RLJob", name))
    kube.delete("Namespace", None, name)


@pytest.fixture
def kuberay(control_plane: ControlPlane) -> Callable[..., Process]:
    """Run a version of KubeRay: `kuberay("1.5.1")`."""
    return control_plane.use_kuberay


@pytest.fixture(scope="session")
def ray(control_plane: ControlPlane) -> Iterator[RayStandIn]:
    """What answers for the pods that kwok only pretends to run."""
    stand_in = RayStandIn(control_plane)
    stand_in.start()
    yield stand_in
    stand_in.stop()


@pytest.fixture
def proxy(control_plane: ControlPlane) -> Iterator[FaultProxy]:
    """A proxy to the API server that breaks nothing yet."""
    proxy = FaultProxy(control_plane)
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, control_plane: ControlPlane, ray: RayStandIn) -> Iterator[Running]:
    """The requesting module's scenarios, as many as this run of the tests selected."""
    control_plane.use_kuberay("1.6.2")
    scenarios: Scenarios = request.module.scenario
    with scenarios.started(selected(request), control_plane, ray) as running:
        yield running
