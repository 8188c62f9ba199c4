"""An operator beside thousands of finished jobs: what it takes at rest, and what an event from a pod costs it.

    python benchmarks/operator_idle.py [--jobs 5000]

The API server is real; the jobs get the status of one that has really ended. At rest, processor time and memory of a
minute count. Then sixteen clients change the status of labelled pods as fast as the API server takes it, and the
operator's processor time is divided by the changes: first of pods of finished jobs, then of such as make it look at
their jobs, which are suspended (of running ones each look would be a request to a driver too). Exits with 1 when a
figure misses its limit.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from figures import Figure, report
from operator_scale import CLIENTS, NAMESPACE, WATCHED_SECONDS, control_plane, each, limit, operator_of, wait_phases

# Found by the paths that operator_scale adds.
from kube import Kube, Object  # isort: skip
from operator_process import OperatorProcess  # isort: skip
from programs import missing  # isort: skip
from ray_driver import Attempt, Script  # isort: skip
from small_jobs import small_job  # isort: skip

PERCENT_LIMIT, MEMORY_LIMIT_MB, EVENTS_LIMIT = 2.0, 250.0, 1000.0
SETTLED_SECONDS, BUSY_SECONDS = 30.0, 20.0
PODS = 200


def finished_jobs(kube: Kube, status: Object, count: int) -> None:
    """Jobs that have the status of one that ended."""

    def make(number: int) -> None:
        name = f"old-{number:05d}"
        kube.create(small_job(NAMESPACE, name))
        kube.patch("RLJob", NAMESPACE, name, {"status": status}, subresource="status")

    began = time.monotonic()
    each(make, count)
    print(f"  {count} finished jobs made in {time.monotonic() - began:.0f} s", flush=True)


def suspended_jobs(kube: Kube) -> None:
    """A job for each pod, that the operator has suspended."""
    each(lambda number: kube.create(small_job(NAMESPACE, f"held-{number:05d}", "suspend=true")), PODS)
    wait_phases(kube, "Suspended", PODS)


def pod(job: str) -> Object:
    """A pod of a job that no scheduler takes."""
    labels = {"ray.io/cluster": job, "ray.io/node-type": "worker", "rljob.dev/job": job}
    spec = {"schedulingGates": [{"name": "rljob.dev/never"}], "containers": [{"name": "one", "image": "none"}]}
    metadata = {"name": f"pod-{job}", "namespace": NAMESPACE, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def at_rest(operator: OperatorProcess) -> tuple[float, float]:
    """Percent of a core in a minute, and memory in MB."""
    time.sleep(SETTLED_SECONDS)
    used, began = operator.process.cpu_seconds(), time.monotonic()
    time.sleep(WATCHED_SECONDS)
    percent = 100 * (operator.process.cpu_seconds() - used) / (time.monotonic() - began)
    return percent, operator.process.resident_bytes() / 1e6


def events_of_a_second(kube: Kube, operator: OperatorProcess, jobs: str) -> float:
    """Changes of pods of jobs with such names that the operator digests in a second of processor time."""
    each(lambda number: kube.create(pod(f"{jobs}-{number:05d}")), PODS)
    time.sleep(5)
    used, end = operator.process.cpu_seconds(), time.monotonic() + BUSY_SECONDS

    def change(client: int) -> int:
        sent = 0
        while time.monotonic() < end:
            name = f"pod-{jobs}-{(client * 977 + sent * CLIENTS) % PODS:05d}"
            kube.patch("Pod", NAMESPACE, name, {"status": {"message": f"{client}-{sent}"}}, subresource="status")
            sent += 1
        return sent

    with ThreadPoolExecutor(CLIENTS) as clients:
        changes = sum(clients.map(change, range(CLIENTS)))
    time.sleep(5)
    seconds = operator.process.cpu_seconds() - used
    print(
        f"  {changes} changes of pods of {jobs} jobs in {BUSY_SECONDS:.0f} s: {1e3 * seconds / changes:.2f} ms each",
        flush=True,
    )
    return changes / seconds


def main() -> int:
    """Run it and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=5000, help="finished jobs")
    count = parser.parse_args().jobs
    if problem := missing():
        print(problem)
        return 1
    with control_plane() as plane:
        with operator_of(plane) as (_, ray):
            ray.default_script = Script([Attempt(step_seconds=0.05)])
            plane.kube.create(small_job(NAMESPACE, "first"))
            wait_phases(plane.kube, "Succeeded", 1)
            status = plane.kube.get("RLJob", NAMESPACE, "first")["status"]
        finished_jobs(plane.kube, status, count)
        with operator_of(plane) as (operator, _):
            percent, megabytes = at_rest(operator)
            old = events_of_a_second(plane.kube, operator, "old")
            suspended_jobs(plane.kube)
            held = events_of_a_second(plane.kube, operator, "held")
    return report(
        [
            limit(f"operator's percent of a core beside {count} finished jobs", percent, PERCENT_LIMIT),
            limit(f"operator's memory beside {count} finished jobs (MB)", megabytes, MEMORY_LIMIT_MB),
            Figure("changes of finished jobs' pods in a second of processor time", "its limit", old, EVENTS_LIMIT),
            Figure("the same, where each makes it look at the job", "its limit", held, EVENTS_LIMIT),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
