"""Life-cycle tests wait more than they work: they run side by side, each in a namespace of its own.

A module says which functions are scenarios; all that were selected start together, and each test waits for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from control_plane import unique
from fault_proxy import FaultProxy
from kube import Kube, Object, wait_until
from kwok_cluster import KwokCluster
from operator_process import REPOSITORY, OperatorProcess
from ray_driver import Script
from ray_standin import RayStandIn
from small_jobs import small_job, wait_phase

PHASE_SECONDS = 90.0


class Case:
    """One scenario's namespace, and what is asked about the job in it."""

    def __init__(self, control_plane: KwokCluster, ray: RayStandIn, operator: OperatorProcess | None) -> None:
        self.control_plane = control_plane
        self.ray = ray
        self.operator = operator
        self.kube: Kube = control_plane.kube
        self.namespace = unique("case")
        self.kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}})
        self.kube.wait_for("ServiceAccount", self.namespace, "default", lambda _: True)

    def close(self) -> None:
        """Delete the namespace; nobody waits for it."""
        self.kube.request("DELETE", self.kube.path("RLJob", self.namespace))
        self.kube.delete("Namespace", None, self.namespace)

    # --- the job -------------------------------------------------------------------------------

    def create(self, *settings: str, name: str = "job", attempts: list[Any] | None = None) -> Object:
        """Create a job; `attempts` script its drivers."""
        if attempts:
            self.ray.scripts[(self.namespace, name)] = Script(list(attempts))
        return self.kube.create(small_job(self.namespace, name, *settings))

    def job(self, name: str = "job") -> Object:
        """The RLJob as it is now."""
        return self.kube.get("RLJob", self.namespace, name)

    def status(self, name: str = "job") -> Object:
        """Its status."""
        status: Object = self.job(name).get("status", {})
        return status

    def wait(self, *phases: str, name: str = "job", seconds: float = PHASE_SECONDS) -> Object:
        """Wait for one of the phases; another end is an error at once."""
        return wait_phase(self.kube, self.namespace, name, phases, seconds)

    def wait_status(self, holds: Callable[[Object], Any], name: str = "job", seconds: float = PHASE_SECONDS) -> Object:
        """Wait until something holds of the status."""
        job = self.kube.wait_for("RLJob", self.namespace, name, lambda job: holds(job.get("status", {})), seconds)
        status: Object = job["status"]
        return status

    def change(self, spec: Object, name: str = "job") -> None:
        """Merge into the spec."""
        self.kube.patch("RLJob", self.namespace, name, {"spec": spec})

    # --- what belongs to it --------------------------------------------------------------------

    def cluster(self, name: str = "job") -> Object | None:
        """Its RayCluster."""
        return self.kube.find("RayCluster", self.namespace, name)

    def wait_cluster(self, name: str = "job", seconds: float = PHASE_SECONDS) -> Object:
        """Wait for its RayCluster."""
        return self.kube.wait_for("RayCluster", self.namespace, name, lambda _: True, seconds)

    def pods(self, role: str = "", name: str = "job") -> list[Object]:
        """Its pods that are not being deleted."""
        labels = f"ray.io/cluster={name}" + (f",ray.io/node-type={role}" if role else "")
        pods = self.kube.list("Pod", self.namespace, labels)
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def children(self) -> list[str]:
        """Objects that the operator made in the namespace, and those made from them."""
        kinds = ("RayCluster", "Secret", "NetworkPolicy", "Pod", "Service")
        return [f"{kind} {item['metadata']['name']}" for kind in kinds for item in self.kube.list(kind, self.namespace)]

    def wait_no_children(self, seconds: float = PHASE_SECONDS) -> None:
        """Wait until the garbage collector has taken all of it."""
        assert wait_until(lambda: not self.children(), seconds), self.children()

    def events(self, name: str = "job") -> list[str]:
        """`reason: message` of the job's events."""
        events = self.kube.list("Event", self.namespace)
        mine = [event for event in events if event["involvedObject"].get("kind") == "RLJob"]
        return [f"{event['reason']}: {event['message']}" for event in mine if event["involvedObject"]["name"] == name]

    def submissions(self, name: str = "job") -> list[str]:
        """Ids that Ray accepted for the job, in order."""
        return self.ray.submissions(self.namespace, name)

    # --- another operator ----------------------------------------------------------------------

    def own_operator(
        self, proxy: FaultProxy | None = None, code: Path = REPOSITORY, **settings: str
    ) -> OperatorProcess:
        """An operator for this namespace alone; the caller starts and kills it."""
        server = proxy.url if proxy is not None else None
        return OperatorProcess(self.control_plane, self.ray, self.namespace, server, settings=settings, code=code)


Scenario = Callable[[Case], None]


class Scenarios:
    """The scenarios of one module, which run `together` at a time, under one operator or each under its own."""

    def __init__(self, together: int = 8, one_operator: bool = True, settings: Mapping[str, str] | None = None) -> None:
        self.functions: dict[str, Scenario] = {}
        self.settings = settings
        self.together = together
        self.one_operator = one_operator

    def __call__(self, function: Scenario) -> Scenario:
        """Register a function under its name."""
        self.functions[function.__name__] = function
        return function

    @contextmanager
    def started(self, names: list[str], control_plane: KwokCluster, ray: RayStandIn) -> Iterator[Running]:
        """Start the named ones; at the end no more are begun and their operator is ended."""
        operator = OperatorProcess(control_plane, ray, None, settings=self.settings) if self.one_operator else None
        if operator:
            operator.start()
        running = Running({name: self.functions[name] for name in names}, control_plane, ray, operator, self.together)
        try:
            yield running
        finally:
            running.stop()
            if operator:
                operator.kill()


class Running:
    """Scenarios that run; `result` waits for one of them."""

    def __init__(
        self,
        functions: dict[str, Scenario],
        control_plane: KwokCluster,
        ray: RayStandIn,
        operator: OperatorProcess | None,
        together: int,
    ) -> None:
        self._pool = ThreadPoolExecutor(together)
        self._futures: dict[str, Future[None]] = {}

        def run(function: Scenario) -> None:
            case = Case(control_plane, ray, operator)
            function(case)
            case.close()

        for name, function in functions.items():
            self._futures[name] = self._pool.submit(run, function)

    def result(self, name: str, seconds: float = 300.0) -> None:
        """Wait for the end of a scenario and raise what it raised."""
        self._futures[name].result(seconds)

    def stop(self) -> None:
        """Begin no more."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def selected(request: pytest.FixtureRequest) -> list[str]:
    """Names of the scenarios of the requesting module that this run of the tests selected."""
    module = request.node.getparent(pytest.Module)
    mine = [item for item in request.session.items if item.getparent(pytest.Module) is module]
    parameters = [item.callspec.params for item in mine if hasattr(item, "callspec")]
    return [given["name"] for given in parameters if "name" in given]
