"""Pods that have nothing to do with a job and try its ports, see `stranger.py`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from control_plane import unique
from kube import Object
from node_jobs import NodeJob, oldest, processes_of

_SCRIPT = Path(__file__).with_name("stranger.py")
_LISTEN = "0A"
_LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
_START_SECONDS = 60.0
Answers = dict[str, list[str]]
"""`ADDRESS:PORT` that takes a connection -> what answers there."""


class Stranger:
    """A pod in some namespace with some labels."""

    def __init__(self, job: NodeJob, namespace: str, labels: Mapping[str, str]) -> None:
        self._job, self._namespace = job, namespace
        self.name = unique("stranger")
        self._job.kube.create(self._manifest(labels))

    def tries(self, places: Mapping[str, list[int]], token: str = "") -> Answers:
        """Findings at these ports of these addresses."""
        where = (self.name, f"--namespace={self._namespace}")
        command = [sys.executable, str(_SCRIPT), json.dumps(places), *([token] if token else [])]
        said = self._job.system.cluster.kubectl("exec", *where, "--", *command)
        answers: Answers = json.loads(said.splitlines()[-1])
        return answers

    def wait(self) -> None:
        """Until it runs."""

        def runs(pod: Object) -> bool:
            return bool(pod["status"]["phase"] == "Running")

        self._job.kube.wait_for("Pod", self._namespace, self.name, runs, _START_SECONDS)

    def delete(self) -> None:
        """End it."""
        self._job.kube.delete("Pod", self._namespace, self.name, gracePeriodSeconds=0)

    def _manifest(self, labels: Mapping[str, str]) -> Object:
        mounted = [volume for volume in self._job.manifest["spec"]["storage"]["volumes"] if volume["readOnly"]]
        container = {
            "name": "stranger",
            "image": self._job.manifest["spec"]["image"],
            "command": ["sleep", "100000"],
            "volumeMounts": [
                {"name": each["name"], "mountPath": each["mountPath"], "readOnly": True} for each in mounted
            ],
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self.name, "namespace": self._namespace, "labels": dict(labels)},
            "spec": {
                "containers": [container],
                "volumes": [{"name": each["name"], "hostPath": {"path": each["hostPath"]}} for each in mounted],
                "automountServiceAccountToken": False,
                "terminationGracePeriodSeconds": 0,
            },
        }


@contextmanager
def strangers(job: NodeJob, wanted: Mapping[str, tuple[str, Mapping[str, str]]]) -> Iterator[dict[str, Stranger]]:
    """One for each namespace and labels, by the same names."""
    made: dict[str, Stranger] = {}
    try:
        made |= {name: Stranger(job, namespace, labels) for name, (namespace, labels) in wanted.items()}
        for stranger in made.values():
            stranger.wait()
        yield made
    finally:
        for stranger in made.values():
            stranger.delete()


def listening(job: NodeJob) -> dict[str, list[int]]:
    """The TCP ports that a job's pods listen on beyond loopback, by the pod's address."""
    found = {}
    for pod in job.pods():
        # The oldest that is there: a probe's process may end before it is read.
        first = oldest(processes_of(pod["metadata"]["uid"]))
        lines = [
            line.split()
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/{first}/net/{table}").read_text().splitlines()[1:]
        ]
        places = [line[1].split(":") for line in lines if line[3] == _LISTEN]
        found[pod["status"]["podIP"]] = sorted({int(port, 16) for address, port in places if address not in _LOOPBACK})
    return found
