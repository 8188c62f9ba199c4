"""1,000 RLJobs on a real control plane, against 1,000 bare RayClusters under KubeRay alone in the same run.

    python benchmarks/operator_scale.py [--jobs 1000] [--repeats 1]

etcd, API server, scheduler and KubeRay are real, kwok plays the nodes, and on both sides a stand-in answers for Ray in
the head pods and reads their Secrets as a kubelet would. The bare clusters are those that the operator renders, so that
both sides have the same pods. Sixteen clients create as fast as the API server takes them; a side's time runs from its
first creation to its last ready RayCluster. Each side has a control plane of its own, new each time. Exits with 1 when
a figure misses its limit.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / part) for part in ("crds", "operator", "tests", "tests/cluster")]

from fault_proxy import FaultProxy  # noqa: E402
from figures import Figure, report  # noqa: E402
from kube import Kube, Object, wait_until  # noqa: E402
from kwok_cluster import KwokCluster  # noqa: E402
from operator_process import OperatorProcess  # noqa: E402
from programs import missing  # noqa: E402
from ray_driver import Attempt, Script  # noqa: E402
from ray_standin import RayStandIn  # noqa: E402
from small_jobs import small_job  # noqa: E402

CLIENTS = 16
NAMESPACE = "scale"
TIME_LIMIT = 1.5
MEMORY_LIMIT_MB = 150.0
WRITES_LIMIT = 8.0
STATUS_WRITES_LIMIT = 6.0
QUIET_LIMIT = 0.0
WATCHED_SECONDS = 60.0
COUNTED_JOBS = 20
DEADLINE = 1200.0


@contextmanager
def control_plane() -> Iterator[KwokCluster]:
    """A new one, with KubeRay and the benchmark's namespace."""
    folder = Path(tempfile.mkdtemp(prefix="rljob-scale-"))
    plane = KwokCluster(folder, [yaml.safe_load((REPOSITORY / "crds" / "rljob.dev_rljobs.yaml").read_text())])
    try:
        plane.start()
        plane.use_kuberay("1.6.2")
        plane.kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        plane.kube.wait_for("ServiceAccount", NAMESPACE, "default", lambda _: True)
        yield plane
    finally:
        plane.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def heads_of(plane: KwokCluster) -> Iterator[RayStandIn]:
    """The stand-in for Ray."""
    ray = RayStandIn(plane)
    ray.default_script = Script([Attempt(step_seconds=30.0)])
    ray.start()
    try:
        yield ray
    finally:
        ray.stop()


@contextmanager
def operator_of(plane: KwokCluster, proxy: FaultProxy | None = None) -> Iterator[tuple[OperatorProcess, RayStandIn]]:
    """An operator for all namespaces, and the stand-in for Ray."""
    with heads_of(plane) as ray:
        operator = OperatorProcess(plane, ray, None, proxy.url if proxy is not None else None, cold=True)
        operator.start()
        try:
            yield operator, ray
        finally:
            operator.kill()


def each(call: Callable[[int], object], count: int) -> None:
    """Call it with each number, by 16 clients at the same time."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        for _ in clients.map(call, range(count)):
            pass


def create_all(kube: Kube, make: Callable[[int], Object], count: int) -> float:
    """Create so many objects with 16 clients; return when the first request went out."""
    began = time.monotonic()
    each(lambda number: kube.create(make(number)), count)
    print(f"  created {count} in {time.monotonic() - began:.1f} s", flush=True)
    return began


def column(kube: Kube, kind: str, name: str) -> list[Any]:
    """Cells of a printed column, which is far less to read than the objects."""
    table = kube.table(kind, NAMESPACE)
    index = [heading["name"].lower() for heading in table["columnDefinitions"]].index(name)
    return [row["cells"][index] for row in table["rows"]]


def wait_ready(kube: Kube, count: int, began: float) -> float:
    """Wait until so many RayClusters are ready; return the seconds since `began`."""
    ready = wait_until(lambda: column(kube, "RayCluster", "status").count("ready") >= count, DEADLINE, 0.5)
    seconds = time.monotonic() - began
    if not ready:
        raise SystemExit(f"Only {column(kube, 'RayCluster', 'status').count('ready')} of {count} clusters got ready")
    print(f"  {count} RayClusters ready after {seconds:.1f} s", flush=True)
    return seconds


def job(number: int) -> Object:
    """An RLJob whose driver works on while the benchmark lasts."""
    return small_job(NAMESPACE, f"job-{number:04d}", "steps=100000", "checkpoint.everySteps=100")


def rendered_cluster() -> Object:
    """The RayCluster that the operator makes of such a job, as somebody would apply it by hand."""
    with control_plane() as plane, operator_of(plane) as (_, _):
        plane.kube.create(job(0))
        made = plane.kube.wait_for("RayCluster", NAMESPACE, "job-0000", lambda _: True)
    return {"apiVersion": made["apiVersion"], "kind": made["kind"], "spec": made["spec"]}


def bare_side(template: Object, count: int) -> float:
    """KubeRay alone."""
    print(f"{count} bare RayClusters", flush=True)
    with control_plane() as plane, heads_of(plane):
        began = create_all(
            plane.kube,
            lambda number: {**template, "metadata": {"name": f"job-{number:04d}", "namespace": NAMESPACE}},
            count,
        )
        return wait_ready(plane.kube, count, began)


class MemoryPeak:
    """The operator's resident memory, looked at twice a second."""

    def __init__(self, operator: OperatorProcess) -> None:
        self.peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(operator,), daemon=True)
        self._thread.start()

    def _watch(self, operator: OperatorProcess) -> None:
        while not self._ended.wait(0.5):
            self.peak = max(self.peak, operator.process.resident_bytes())

    def end(self) -> float:
        """Stop looking; return the peak in MB."""
        self._ended.set()
        self._thread.join()
        return self.peak / 1e6


def job_side(count: int) -> tuple[float, float]:
    """KubeRay and the operator; return seconds and the operator's peak memory in MB."""
    print(f"{count} RLJobs", flush=True)
    with control_plane() as plane, operator_of(plane) as (operator, _):
        memory = MemoryPeak(operator)
        began = create_all(plane.kube, job, count)
        seconds = wait_ready(plane.kube, count, began)
        running = wait_until(lambda: column(plane.kube, "RLJob", "phase").count("Running") >= count, DEADLINE, 0.5)
        if not running:
            raise SystemExit(f"Only {column(plane.kube, 'RLJob', 'phase').count('Running')} of {count} jobs run")
        used = operator.process.cpu_seconds()
        print(f"  {count} RLJobs running after {time.monotonic() - began:.1f} s", flush=True)
        print(f"  the operator used {used:.1f} s of processor time, {1e3 * used / count:.0f} ms a job", flush=True)
        time.sleep(10)
        return seconds, memory.end()


def limit(what: str, value: float, limit: float, against: str = "its limit") -> Figure:
    return Figure(what, against, value, limit, at_most=True)


def counted_side(count: int) -> list[Figure]:
    """Requests of the operator to the API server, counted by a proxy between them."""
    print(f"{count} RLJobs, requests counted", flush=True)
    with control_plane() as plane:
        proxy = FaultProxy(plane)
        proxy.start()
        with operator_of(plane, proxy) as (_, ray):
            kube = plane.kube
            create_all(kube, job, count)
            wait_phases(kube, "Running", count)
            to_running = [len(proxy.requests(writes=True, name=f"job-{number:04d}")) for number in range(count)]
            ray.default_script = Script([Attempt(step_seconds=0.05)])
            for number in range(count):
                kube.create(small_job(NAMESPACE, f"done-{number:04d}"))
                kube.create(small_job(NAMESPACE, f"idle-{number:04d}", "suspend=true"))
            wait_phases(kube, "Succeeded", count)
            wait_phases(kube, "Suspended", count)
            time.sleep(5)
            began = time.time()
            time.sleep(WATCHED_SECONDS)
            asked = proxy.requests(since=began)
        proxy.stop()
    running = [sum(one.is_write and one.name == f"job-{number:04d}" for one in asked) for number in range(count)]
    quiet = [one for one in asked if one.name.startswith(("done-", "idle-"))]
    minute = 60.0 / WATCHED_SECONDS
    return [
        limit("writes of a job from its creation to Running (most)", max(to_running), WRITES_LIMIT),
        limit("status writes of a running job in a minute (most)", max(running) * minute, STATUS_WRITES_LIMIT),
        limit("requests for finished and suspended jobs in a minute (all)", len(quiet) * minute, QUIET_LIMIT),
    ]


def wait_phases(kube: Kube, phase: str, count: int) -> None:
    """Wait until so many jobs are in a phase."""
    if not wait_until(lambda: column(kube, "RLJob", "phase").count(phase) >= count, 300, 0.5):
        raise SystemExit(f"Only {column(kube, 'RLJob', 'phase').count(phase)} of {count} jobs got {phase}")


def main() -> int:
    """Run all sides and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000, help="jobs of a side")
    parser.add_argument("--repeats", type=int, default=1, help="how often the two sides take turns; medians count")
    options = parser.parse_args()
    if problem := missing():
        print(problem)
        return 1
    template = rendered_cluster()
    bare, jobs, memory = [], [], []
    for _ in range(options.repeats):
        bare.append(bare_side(template, options.jobs))
        seconds, megabytes = job_side(options.jobs)
        jobs.append(seconds)
        memory.append(megabytes)
    ratio = statistics.median(jobs) / statistics.median(bare)
    figures = [
        limit(
            f"time until the RayClusters of {options.jobs} new RLJobs are ready",
            ratio,
            TIME_LIMIT,
            f"{options.jobs} bare RayClusters",
        ),
        limit("operator's memory with them (peak, MB)", max(memory), MEMORY_LIMIT_MB),
        *counted_side(min(COUNTED_JOBS, options.jobs)),
    ]
    print(f"bare {statistics.median(bare):.1f} s, RLJobs {statistics.median(jobs):.1f} s")
    return report(figures)


if __name__ == "__main__":
    sys.exit(main())
