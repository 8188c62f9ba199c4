"""What HCCL must be told about a pod's network, and the ports that it must leave to others.

What the manifest itself says goes to the processes of each role (`rljob_api.roles`), which need it without pods too.
Sources: CANN environment variable reference (8.5, 9.0); MindCluster's training guides (interface and address by
hostNetwork).
"""

from __future__ import annotations

from rljob_api.json_types import Json
from rljob_api.roles import interface_variables
from rljob_api.spec import HcclPorts, RLJobSpec
from rljob_operator.render.errors import RenderError

_POD_INTERFACE = "=eth0"
_RAY_WORKER_PORTS = (10002, 19999)
"""Ray's default for `--min-worker-port` and `--max-worker-port`."""
_SYSTEM_PORTS = 1023


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


def check_hccl(spec: RLJobSpec) -> None:
    """Refuse ports that others use."""
    _check_ports("spec.hccl.trainerPorts", spec.hccl.trainer_ports)
    _check_ports("spec.hccl.rolloutPorts", spec.hccl.rollout_ports)


def _check_ports(field: str, ports: HcclPorts) -> None:
    for side, given in (("host", ports.host), ("device", ports.device)):
        if given is not None and given.first <= _SYSTEM_PORTS:
            raise RenderError(f"{field}.{side}", f"ports up to {_SYSTEM_PORTS} belong to the system; take higher ones")
    first, last = _RAY_WORKER_PORTS
    if ports.host is not None and ports.host.first <= last and ports.host.last >= first:
        raise RenderError(
            f"{field}.host",
            f"{ports.host.first} to {ports.host.last} meets the ports of Ray's processes, {first} to {last}; "
            "take others, or none: the system then picks free ports",
        )
