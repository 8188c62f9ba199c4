"""Faults of a node, at a random instant of a running job."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from kube import ApiError, conditions, wait_until
from kueue_process import KUEUE, KueueProcess
from node_cluster import NODE
from node_jobs import START_SECONDS, NodeJob, processes_of
from whole_system import NAMESPACE

API_SERVER_SECONDS = 30.0
PREEMPTED = "preempted by Kueue"
HOSTS_KILLED = "environment hosts killed"
ENVIRONMENT_HOST = "-m rljob_worker.environments.host"
QUEUE_CPUS = "1"
"""Room for one job of the node's, and for nothing beside it."""


def driver_killed(job: NodeJob) -> None:
    job.kill("driver")


def trainer_killed(job: NodeJob) -> None:
    job.kill("trainer")


def engine_killed(job: NodeJob) -> None:
    job.kill("engine")


def worker_pod_deleted(job: NodeJob) -> None:
    job.delete_pod("worker")


def head_pod_deleted(job: NodeJob) -> None:
    job.delete_pod("head")


def operator_killed(job: NodeJob) -> None:
    """SIGKILL the process; kubelet starts its container again."""
    for pod in job.system.operator_pods():
        for pid, line in processes_of(pod["metadata"]["uid"]).items():
            if "rljob_operator" in line:
                os.kill(pid, signal.SIGKILL)


def kubelet_restarted(job: NodeJob) -> None:
    job.system.cluster.programs["kubelet"].stop()
    time.sleep(2)
    job.system.cluster.start_kubelet()


def api_server_stopped(job: NodeJob) -> None:
    job.system.cluster.programs["kube-apiserver"].stop()
    time.sleep(API_SERVER_SECONDS)
    job.system.cluster.start_api_server()


def suspended_and_resumed(job: NodeJob) -> None:
    """Give the pods back in the middle, then go on."""
    job.change({"suspend": True})
    job.wait("Suspended", seconds=120)
    assert wait_until(lambda: not job.pods(), 120, 0.5), job.describe()
    job.change({"suspend": False})


def node_drained(job: NodeJob) -> None:
    """Evict everything, the operator too; the node takes pods again a moment later."""
    cluster = job.system.cluster
    cluster.kubectl("cordon", NODE)
    for pod in [*job.pods(), *job.kube.list("Pod", NAMESPACE)]:
        metadata = pod["metadata"]
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
        }
        with suppress(ApiError):
            job.kube.request(
                "POST", job.kube.path("Pod", metadata["namespace"], metadata["name"], "eviction"), eviction
            )
    time.sleep(5)
    cluster.kubectl("uncordon", NODE)


def environment_hosts_killed(job: NodeJob) -> None:
    """SIGKILL all processes in the head pod that hold environments; others take their places at the next turn."""
    before = _environment_hosts(job)
    assert before, job.describe()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: bool(_environment_hosts(job) - before), START_SECONDS, 0.25), job.describe()


def _environment_hosts(job: NodeJob) -> set[int]:
    """Their ids; the command line of the process that started each names the same module."""
    lines = job.processes("head").items()
    return {pid for pid, line in lines if ENVIRONMENT_HOST in line and "keeper" not in line}


def preempted(job: NodeJob) -> None:
    """Kueue takes its pods for a workload of higher priority, which is there for a moment."""
    name = KueueProcess(job.system.cluster).take("default", 1000, QUEUE_CPUS)
    kind = f"{KUEUE}/Workload"
    job.kube.wait_for(kind, "default", name, lambda it: conditions(it).get("Admitted", {}).get("status") == "True", 120)
    assert wait_until(lambda: not job.pods(), 120, 0.25), job.describe()
    assert wait_until(lambda: "a job of higher priority took its place" in job.why(), 30, 0.5), job.describe()
    job.kube.delete(kind, "default", name)


FAULTS: dict[str, Callable[[NodeJob], None]] = {
    "driver killed": driver_killed,
    "trainer killed": trainer_killed,
    "engine killed": engine_killed,
    "worker pod deleted": worker_pod_deleted,
    "head pod deleted": head_pod_deleted,
    "operator killed": operator_killed,
    "kubelet restarted": kubelet_restarted,
    "API server stopped": api_server_stopped,
    "suspended and resumed": suspended_and_resumed,
    "node drained": node_drained,
    PREEMPTED: preempted,
}
OF_EPISODES: dict[str, Callable[[NodeJob], None]] = {HOSTS_KILLED: environment_hosts_killed}
"""Faults of a job with environments."""
HARMLESS = {"operator killed", "kubelet restarted", "API server stopped", HOSTS_KILLED}
"""Faults that no attempt of the driver may notice."""


def settle(job: NodeJob) -> None:
    """Wait until the operator is at work again."""
    at_work = wait_until(lambda: job.system.value("sum(rljob_operator_leader)") == 1, START_SECONDS, 0.5)
    assert at_work, job.describe()
