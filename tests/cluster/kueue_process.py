"""Kueue as a process beside a control plane, with its CRDs and with the webhooks that concern RayClusters."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from control_plane import READY_SECONDS, ControlPlane, crds_in, unique
from kube import Object, wait_until
from network import Network
from programs import files, program

KUEUE = "kueue.x-k8s.io/v1beta2"
NPU = "huawei.com/Ascend910"
FLAVOR_LABEL = "test.rljob.dev/flavor"
_WEBHOOKS = ("clusterqueues", "resourceflavors", "workloads", "cohorts", "rayclusters")


class KueueProcess:
    """One Kueue, with the integration of RayCluster only; `start` to `stop`.

    Its webhooks are those of its release, at this machine's address instead of a Service's; they have the API
    server's certificate, which is for that address.
    """

    def __init__(self, control_plane: ControlPlane) -> None:
        self._control_plane = control_plane
        self._folder = control_plane.folder / "kueue"
        self._hooks: list[Object] = []

    def start(self) -> None:
        """Install the CRDs, start it, and let the API server ask its webhooks. Raises RuntimeError with its log."""
        plane = self._control_plane
        plane.install_crds(crds_in(files("kueue", "config") / "crd" / "bases"))
        if plane.kube.find("Namespace", None, "kueue-system") is None:
            plane.kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kueue-system"}})
        webhooks, probe = plane.network.free_port(), plane.network.free_port()
        self._write_certificate()
        config = self._folder / "config.yaml"
        config.write_text(json.dumps(self._configuration(webhooks, probe)))
        # Without a certificate of its own it reads that of its metrics in /etc/kueue, whether it serves them or not.
        etc = "mount --make-rprivate / && mount --bind $0 /etc && exec $1 --config=$2"
        command = ["unshare", "--mount", "sh", "-c", etc]
        command += [str(self._folder / "etc"), str(program("kueue")), str(config)]
        self._process = plane.run("kueue", command, {"KUBECONFIG": str(plane.kubeconfig())})
        self._process.wait_for(lambda: plane.http_ok(probe, "/readyz"), READY_SECONDS)
        self._install_webhooks(webhooks)

    def stop(self) -> None:
        """End it; RayClusters can then be made without it."""
        for hook in self._hooks:
            self._control_plane.kube.delete(hook["kind"], None, hook["metadata"]["name"])
        self._process.kill()

    def queue(self, namespace: str, npus: int, cpus: str = "100000") -> None:
        """Make a queue for one namespace: LocalQueue `rl`, ClusterQueue and ResourceFlavor of the namespace's name.

        Args:
            namespace: where jobs are; the nodes of the flavor are all that have FLAVOR_LABEL.
            npus: quota of NPU.
            cpus: quota of cpu; more than a test asks for, as there is of memory.
        """
        quotas = {"cpu": cpus, "memory": "1Pi", NPU: str(npus)}
        flavor = {"name": namespace, "resources": [{"name": key, "nominalQuota": quotas[key]} for key in quotas]}
        for kind, name, spec in (
            ("ResourceFlavor", namespace, {"nodeLabels": {FLAVOR_LABEL: "a2"}}),
            (
                "ClusterQueue",
                namespace,
                {
                    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
                    "preemption": {"withinClusterQueue": "LowerPriority"},
                    "resourceGroups": [{"coveredResources": list(quotas), "flavors": [flavor]}],
                },
            ),
            ("LocalQueue", "rl", {"clusterQueue": namespace}),
        ):
            metadata = {"name": name, **({"namespace": namespace} if kind == "LocalQueue" else {})}
            self._control_plane.kube.create({"apiVersion": KUEUE, "kind": kind, "metadata": metadata, "spec": spec})

    def take(self, namespace: str, priority: int, cpus: str, **annotations: str) -> str:
        """Make a workload of another kind in that queue, which takes so much for itself; returns its name."""
        container = {"name": "one", "image": "none", "resources": {"requests": {"cpu": cpus}}}
        pods = {"name": "main", "count": 1, "template": {"spec": {"containers": [container], "restartPolicy": "Never"}}}
        name = unique("urgent")
        spec = {"queueName": "rl", "priority": priority, "podSets": [pods]}
        metadata = {"name": name, "namespace": namespace, "annotations": annotations}
        self._control_plane.kube.create({"apiVersion": KUEUE, "kind": "Workload", "metadata": metadata, "spec": spec})
        return name

    def _write_certificate(self) -> None:
        folder = self._folder / "etc" / "kueue" / "metrics" / "certs"
        folder.mkdir(parents=True, exist_ok=True)
        for ending, name in ((".crt", "tls.crt"), (".key", "tls.key")):
            shutil.copy(self._control_plane.authority.with_suffix(ending), folder / name)

    def _configuration(self, webhooks: int, probe: int) -> dict[str, Any]:
        return {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": "kueue-system",
            "health": {"healthProbeBindAddress": f"127.0.0.1:{probe}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"host": Network.ADDRESS, "port": webhooks, "certDir": "/etc/kueue/metrics/certs"},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "clientConnection": {"qps": 1000, "burst": 2000},
            "integrations": {"frameworks": ["ray.io/raycluster"]},
            "featureGates": {"VisibilityOnDemand": False, "PriorityBoost": True},
        }

    def _install_webhooks(self, port: int) -> None:
        authority = base64.b64encode(self._control_plane.authority.read_bytes()).decode()
        text = (files("kueue", "config") / "webhook" / "manifests.yaml").read_text()
        for document in yaml.safe_load_all(text):
            document["metadata"]["name"] = f"kueue-{document['metadata']['name']}"
            document["webhooks"] = [hook for hook in document["webhooks"] if _concerns(hook)]
            for hook in document["webhooks"]:
                path = hook["clientConfig"]["service"]["path"]
                hook["clientConfig"] = {"url": f"https://{Network.ADDRESS}:{port}{path}", "caBundle": authority}
            self._hooks.append(self._control_plane.kube.create(document))
        self._wait_webhooks()

    def _wait_webhooks(self) -> None:
        """Until the API server asks them: it learns of them by a watch."""
        cluster = {
            "apiVersion": "ray.io/v1", "kind": "RayCluster",
            "metadata": {"name": "probe", "namespace": "default", "labels": {"kueue.x-k8s.io/queue-name": "none"}},
            "spec": {"headGroupSpec": {"rayStartParams": {}, "template": {"spec": {"containers": []}}}},
        }  # fmt: skip

        def asked() -> bool:
            made = self._control_plane.kube.create(cluster, dryRun="All")
            return made["spec"].get("suspend") is True

        if not wait_until(asked, READY_SECONDS):
            raise RuntimeError(f"Kueue's webhooks do not suspend RayClusters:\n{self._process.tail()}")


def _concerns(hook: Object) -> bool:
    return all(resource.split("/")[0] in _WEBHOOKS for rule in hook["rules"] for resource in rule["resources"])


@contextmanager
def running_kueue(control_plane: ControlPlane) -> Iterator[KueueProcess]:
    """Run a Kueue for as long as the block."""
    kueue = KueueProcess(control_plane)
    try:
        kueue.start()
        yield kueue
    finally:
        kueue.stop()
