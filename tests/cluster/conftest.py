"""Fixtures of the cluster tests: one control plane for all of them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import yaml
from control_plane import unique
from fault_proxy import FaultProxy
from kube import ApiError, Kube
from kwok_cluster import KwokCluster
from node_cluster import missing_for_nodes
from processes import Process
from programs import missing, missing_to_make
from ray_standin import RayStandIn
from scenarios import Running, Scenarios, selected
from whole_system import WholeSystem

HERE = Path(__file__).parent
CRD = HERE.parents[1] / "crds" / "rljob.dev_rljobs.yaml"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests whose programs are missing; the reason names them.

    The programs themselves need not be there in a run that builds them.
    """
    items.sort(key=lambda item: not _builds(item))
    lack_programs = missing_to_make if any(map(_builds, items)) else missing
    for marker, lack in (("cluster", lack_programs), ("node", missing_for_nodes)):
        mine = [item for item in items if item.get_closest_marker(marker)]
        if mine and (reason := lack()):
            for item in mine:
                item.add_marker(pytest.mark.skip(reason=reason))


def _builds(item: pytest.Item) -> bool:
    return item.path == HERE / "test_programs.py"


@contextmanager
def kept_when_failed(prefix: str) -> Iterator[Path]:
    """A folder for data and logs, which stays when a test failed."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    except BaseException:
        _failed.append(prefix)
        raise
    finally:
        if not _failed:
            shutil.rmtree(folder, ignore_errors=True)


_shared = ExitStack()
"""Fixtures shared by all tests with a control plane, or all with a node: they end with the last of them, as the
tests that follow need their memory and the processors."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After the fixtures of modules, which use what is shared."""
    yield
    if nextitem is None or HERE not in nextitem.path.parents or _on_node(item) != _on_node(nextitem):
        _shared.close()


def _on_node(item: pytest.Item) -> bool:
    return item.get_closest_marker("node") is not None


@pytest.fixture(scope="session")
def control_plane() -> KwokCluster:
    """A running control plane with the RLJob CRD, without KubeRay."""
    return _shared.enter_context(_running_control_plane())


@contextmanager
def _running_control_plane() -> Iterator[KwokCluster]:
    with kept_when_failed("rljob-cluster-") as folder:
        plane = KwokCluster(folder, [yaml.safe_load(CRD.read_text())])
        try:
            plane.start()
            yield plane
            plane.check()
        finally:
            plane.stop()


@pytest.fixture(scope="session")
def system() -> WholeSystem:
    """A real node with KubeRay, the chart and Prometheus."""
    return _shared.enter_context(_running_system())


@contextmanager
def _running_system() -> Iterator[WholeSystem]:
    with kept_when_failed("rljob-node-") as folder:
        system = WholeSystem(folder)
        try:
            system.start()
            yield system
            system.cluster.check()
        finally:
            system.stop()


_failed: list[str] = []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Name the folder with the logs in each failure."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    given = getattr(item, "funcargs", {})
    plane = given.get("control_plane") or given.get("system")
    if report.failed and plane is not None:
        _failed.append(item.nodeid)
        report.sections.append(("cluster", f"The programs' logs are in {plane.folder}"))


@pytest.fixture
def kube(control_plane: KwokCluster) -> Kube:
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
def kuberay(control_plane: KwokCluster) -> Callable[..., Process]:
    """Run a version of KubeRay: `kuberay("1.5.1")`."""
    return control_plane.use_kuberay


@pytest.fixture(scope="session")
def ray(control_plane: KwokCluster) -> RayStandIn:
    """Answers for the pods that kwok only pretends to run."""
    stand_in = RayStandIn(control_plane)
    stand_in.start()
    _shared.callback(stand_in.stop)
    return stand_in


@pytest.fixture
def proxy(control_plane: KwokCluster) -> Iterator[FaultProxy]:
    """A proxy to the API server that breaks nothing yet."""
    proxy = FaultProxy(control_plane)
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, control_plane: KwokCluster, ray: RayStandIn) -> Iterator[Running]:
    """The requesting module's scenarios, as many as this run of the tests selected."""
    control_plane.use_kuberay("1.6.2")
    scenarios: Scenarios = request.module.scenario
    with scenarios.started(selected(request), control_plane, ray) as running:
        yield running
