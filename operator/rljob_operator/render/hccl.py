"""Variables with which HCCL uses a pod's network.

What the manifest itself says goes to the processes of each role (`rljob_api.roles`), which need it without pods too.
Sources: CANN environment variable reference (8.5, 9.0); MindCluster's training guides (interface and address by
hostNetwork).
"""

from __future__ import annotations

from rljob_api.json_types import Json
from rljob_api.roles import interface_variables
from rljob_api.spec import RLJobSpec

_POD_INTERFACE = "=eth0"


def hccl_environment(spec: RLJobSpec, *, head: bool) -> list[dict[str, Json]]:
    """HCCL's variables that follow from the network of pods with NPUs, as a container's `env`."""
    if spec.network.host_network:
        # The head may have another interface than the workers, and has no HCCL process.
        if head or not _uses_host_ip(spec):
            return []
        # A pod in the node's network has the node's address.
        return [{"name": "HCCL_IF_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}]
    if spec.hccl.interface is not None:
        return []
    return [{"name": name, "value": value} for name, value in interface_variables(_POD_INTERFACE).items()]


def _uses_host_ip(spec: RLJobSpec) -> bool:
    return spec.hccl.interface is None and spec.hccl.use_host_ip is not False
