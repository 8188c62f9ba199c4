"""A job on the real node: what a test asks about it, and what it does to it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from control_plane import unique
from kube import Kube, Object, wait_until
from small_jobs import wait_phase
from support.slow_reward import write_slow_reward
from whole_system import WholeSystem

from rljob_worker.host.processes import start_time

SEEN_SECONDS = 60.0
"""Until a listing shows what is there: a pod that replaces another, a process that has its name."""
START_SECONDS = 600.0
"""From its creation, or from a fault, until steps are made: pods, Ray, Megatron and vLLM on two cores."""
RUN_SECONDS = 600.0
PROCESSES = {"driver": "rljob run", "trainer": "ray::trainer", "engine": "ray::engine"}
"""Part of the command line of each process of the worker, in lower case: Ray names an actor's process by its class
(`ray::TrainerActor`), and while a method runs by what the actor calls itself (`ray::trainer-0.train`)."""


class NodeJob:
    """One RLJob in the namespace `default`; `settings` are `path=value` below `spec`."""

    def __init__(self, system: WholeSystem, prefix: str, *settings: str) -> None:
        self.system = system
        self.name = unique(prefix)
        self.kube: Kube = system.kube
        self.manifest = system.job(self.name, *settings)

    def going_on(self, seconds: float = 1.0) -> NodeJob:
        """Make it one that goes on until it is stopped, and leaves the processors to others meanwhile: a reward takes
        so many seconds."""
        write_slow_reward(self.system.folder / "shared" / self.name, seconds)
        self.manifest["spec"] |= {"steps": 100_000, "reward": {"python": "/shared/pace.py:score"}}
        return self

    def create(self) -> NodeJob:
        """`kubectl apply` it."""
        path = self.system.folder / f"{self.name}.json"
        path.write_text(json.dumps(self.manifest))
        self.system.cluster.kubectl("apply", "-f", str(path))
        return self

    def delete(self) -> None:
        """Delete it and wait until its pods are gone: they hold memory that the next test needs."""
        self.kube.delete("RLJob", "default", self.name)
        self.kube.wait_gone("RayCluster", "default", self.name, 60)
        for pod in self.pods():
            self.kube.wait_gone("Pod", "default", pod["metadata"]["name"], 90)

    # --- what it is ----------------------------------------------------------------------------

    def status(self) -> Object:
        """Its status."""
        status: Object = self.kube.get("RLJob", "default", self.name).get("status", {})
        return status

    def wait(self, *phases: str, seconds: float = RUN_SECONDS) -> Object:
        """Wait for one of the phases; another end is an error at once."""
        return wait_phase(self.kube, "default", self.name, phases, seconds)

    def wait_step(self, step: int, seconds: float = START_SECONDS) -> None:
        """Wait until so many steps are on record: the run folder has it sooner than the status."""
        there = wait_until(lambda: self.records() and self.records()[-1]["step"] >= step, seconds, 0.25)
        assert there, self.describe()

    def why(self) -> str:
        """Output of `kubectl rljob why`, on one line."""
        return " ".join(self.system.cluster.kubectl("rljob", "why", self.name).split())

    def describe(self) -> str:
        """Texts for a person: the state of the job, its pods and its logs."""
        texts = [
            json.dumps(self.status(), indent=1)[:3000],
            self.system.cluster.kubectl("get", "pods", "-A", "-o", "wide"),
            self.system.cluster.kubectl("get", "events", "-n", "default", "--sort-by=.lastTimestamp")[-3000:],
        ]
        return "\n".join(texts)

    @property
    def run_folder(self) -> Path:
        """The run folder on this machine."""
        [folder] = (self.system.folder / "shared" / self.name / "default").glob("[!.]*")
        return folder

    def records(self) -> list[dict[str, Any]]:
        """The step records so far."""
        files = (self.system.folder / "shared" / self.name).glob("default/*/steps.jsonl")
        # What follows the last line break is being written.
        return [json.loads(line) for file in files for line in file.read_bytes().split(b"\n")[:-1]]

    def pods(self, role: str = "") -> list[Object]:
        """Its pods that are not being deleted; role: head or worker."""
        labels = f"ray.io/cluster={self.name}" + (f",ray.io/node-type={role}" if role else "")
        pods = self.kube.list("Pod", "default", labels)
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def pod(self, role: str) -> Object:
        """Its head or worker pod; while one is being replaced there may be none or two."""
        pods: list[Object] = []

        def one() -> bool:
            pods[:] = self.pods(role)
            return len(pods) == 1

        assert wait_until(one, SEEN_SECONDS), self.describe()
        return pods[0]

    def run_in(self, role: str, *command: str, seconds: float = 120.0) -> str:
        """Run a command in its head or worker pod."""
        pod = self.pod(role)
        where = (pod["metadata"]["name"], f"--container=ray-{role}", "--namespace=default")
        return self.system.cluster.kubectl("exec", *where, "--", *command, seconds=seconds)

    # --- what is done to it --------------------------------------------------------------------

    def processes(self, role: str) -> dict[int, str]:
        """Process id on this machine -> command line, of all processes in its head or worker pod."""
        return {pid: line for pod in self.pods(role) for pid, line in processes_of(pod["metadata"]["uid"]).items()}

    def pid_of(self, process: str) -> int:
        """Id of the driver, the trainer or the engine; a process that is renaming itself has no name for a moment.

        Of several the one that was started first: its children have its name.
        """
        role = "head" if process == "driver" else "worker"
        found: list[int | None] = []

        def seen() -> bool:
            lines = {pid: line for pid, line in self.processes(role).items() if not line.startswith("/bin/sh")}
            found.append(oldest(pid for pid, line in lines.items() if PROCESSES[process] in line.lower()))
            return found[-1] is not None

        assert wait_until(seen, SEEN_SECONDS, 0.1), f"no {process}: {self.processes(role)}"
        assert found[-1] is not None
        return found[-1]

    def kill(self, process: str) -> None:
        """SIGKILL the driver, the trainer or the engine."""
        os.kill(self.pid_of(process), signal.SIGKILL)

    def delete_pod(self, role: str) -> None:
        """Delete its head or worker pod at once, as a node that dies does."""
        pod = self.pod(role)
        self.kube.delete("Pod", "default", pod["metadata"]["name"], gracePeriodSeconds=0)

    def change(self, spec: Object) -> None:
        """Merge into the spec."""
        self.kube.patch("RLJob", "default", self.name, {"spec": spec})


def oldest(pids: Iterable[int]) -> int | None:
    """The one that was started first of those that live; the least id may be a newer one's, once ids begin anew."""
    started = {pid: int(began) for pid in pids if (began := start_time(pid)) is not None}
    return min(started, key=lambda pid: started[pid], default=None)


def processes_of(pod_uid: str) -> dict[int, str]:
    """Process id -> command line of the processes in the control groups of a pod."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"pod{pod_uid}" in (entry / "cgroup").read_text():
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found[int(entry.name)] = line
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
