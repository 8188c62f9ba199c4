"""A control plane whose nodes and pods kwok plays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from control_plane import READY_SECONDS, ControlPlane, crds_in
from kube import conditions, wait_until
from network import Network
from programs import files, program

HOLD = "test.rljob.dev/hold"
"""Pods with this annotation stay Pending after they were bound, as with an image that takes its time."""
LOST = "test.rljob.dev/lost"
"""Nodes with this annotation are left alone by kwok, so that a test can break them."""
NODE_RESOURCES = {
    "cpu": "1000", "memory": "8Ti", "pods": "1000", "ephemeral-storage": "8Ti",
    "huawei.com/Ascend910": "2000", "huawei.com/npu": "2000", "nvidia.com/gpu": "2000",
    "test.rljob.dev/pair": "2",
}  # fmt: skip


class KwokCluster(ControlPlane):
    """A control plane with nodes that are only pretended; pods on them become Running at once.

    Args:
        folder: as in ControlPlane.
        crds: as in ControlPlane.
        nodes: how many nodes kwok plays.
    """

    CONTROLLERS = (
        "garbage-collector-controller", "namespace-controller", "serviceaccount-controller", "resourcequota-controller",
        "node-lifecycle-controller", "taint-eviction-controller", "pod-garbage-collector-controller",
        "clusterrole-aggregation-controller",
    )  # fmt: skip
    NODE_GRACE_SECONDS = 24 * 3600  # nobody sends heartbeats: a test breaks a node by writing its status
    EVICTION_SECONDS = 1

    def __init__(self, folder: Path, crds: Sequence[Mapping[str, Any]], nodes: int = 8) -> None:
        super().__init__(folder, [*crds, *crds_in(files("kwok", "kustomize") / "crd" / "bases", "stages")], Network())
        self._nodes = nodes

    def start_nodes(self) -> None:
        """Start kwok and add its nodes."""
        for stage in _stages():
            self.kube.apply(stage)
        command = [
            str(program("kwok")),
            f"--kubeconfig={self.kubeconfig()}",
            "--manage-all-nodes=true",
            "--enable-crds=Stage",
            "--node-lease-duration-seconds=0",
            f"--node-ip={Network.ADDRESS}",
            "--cidr=10.88.0.0/16",
            "--server-address=127.0.0.1:10247",
        ]
        self.keep("kwok", command, lambda: True)
        for number in range(self._nodes):
            self.add_node(f"node-{number}")
        self.wait_nodes()

    def add_node(self, name: str, pool: str | None = None) -> None:
        """Let kwok play one more node; that of a pool takes only pods that tolerate its taint `pool`."""
        sizes, labels = dict(NODE_RESOURCES), {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        node: dict[str, Any] = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        if pool is not None:
            labels["pool"] = pool
            node["spec"] = {"taints": [{"key": "pool", "value": pool, "effect": "NoSchedule"}]}
        self.kube.create({**node, "status": {"capacity": sizes, "allocatable": sizes}})

    def wait_nodes(self) -> None:
        """Wait until all nodes take pods."""

        def usable() -> bool:
            nodes = self.kube.list("Node")
            return all(
                conditions(node).get("Ready", {}).get("status") == "True" and not node["spec"].get("taints")
                for node in nodes
            )

        if not wait_until(usable, READY_SECONDS):
            raise RuntimeError(f"kwok's nodes were not ready after {READY_SECONDS:.0f} s (logs: {self.folder})")


def _stages() -> list[dict[str, Any]]:
    """kwok's own stages, changed so that tests can hold a pod back and break a node."""
    folder = files("kwok", "kustomize") / "stage"
    stages = [
        yaml.safe_load((folder / name).read_text())
        for name in ("node/fast/node-initialize.yaml", "pod/fast/pod-ready.yaml", "pod/fast/pod-delete.yaml")
    ]
    for stage, annotation in zip(stages, (LOST, HOLD)):
        unless = {"key": f'.metadata.annotations["{annotation}"]', "operator": "DoesNotExist"}
        stage["spec"]["selector"]["matchExpressions"].append(unless)
    return stages
