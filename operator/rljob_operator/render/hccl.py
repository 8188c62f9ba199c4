"""HCCL's pod-wide variables, and the contradictions that would make it hang or fail.

Two HCCL processes share each device: their port ranges belong to the roles (`rljob_api.roles`), all else to the pod,
since it must be the same on every node before `ray start`. Sources: CANN environment variable reference (8.5, 9.0);
MindCluster's training guides (interface and address by hostNetwork).
"""

from __future__ import annotations

from typing import Any

from rljob_api.spec import HcclPorts, RLJobSpec
from rljob_operator.render.errors import RenderError

_POD_INTERFACE = "=eth0"
_RAY_WORKER_PORTS = (10002, 19999)
"""Ray's default for `--min-worker-port` and `--max-worker-port`."""
_SYSTEM_PORTS = 1023


def hccl_environment(spec: RLJobSpec, *, head: bool) -> list[dict[str, Any]]:
    """HCCL's variables of all pods with NPUs, as a container's `env`.

    Raises:
        RenderError: for settings that contradict each other.
    """
    _check(spec)
    hccl = spec.hccl
    # With the node's network the head has another one than the workers, and no HCCL process.
    elsewhere = head and spec.network.host_network
    values = {
        "HCCL_CONNECT_TIMEOUT": str(hccl.connect_timeout_seconds),
        "HCCL_DETERMINISTIC": str(hccl.deterministic).lower(),
        "HCCL_EXEC_TIMEOUT": _text(hccl.exec_timeout_seconds),
        "HCCL_BUFFSIZE": _text(hccl.buffer_size_mb),
        "HCCL_OP_EXPANSION_MODE": hccl.op_expansion_mode,
        **({} if elsewhere else _interface(spec)),
    }
    env: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in values.items() if value is not None]
    if _uses_host_ip(spec) and not elsewhere:
        # A pod in the node's network has the node's address.
        env.append({"name": "HCCL_IF_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}})
    return env


def _text(value: int | None) -> str | None:
    return None if value is None else str(value)


def _uses_host_ip(spec: RLJobSpec) -> bool:
    if not spec.network.host_network or spec.hccl.interface is not None:
        return False
    return spec.hccl.use_host_ip is not False


def _interface(spec: RLJobSpec) -> dict[str, str]:
    interface = spec.hccl.interface
    if interface is None:
        if spec.network.host_network:
            return {}
        interface = _POD_INTERFACE
    variables = {"HCCL_SOCKET_IFNAME": interface}
    exact = interface.removeprefix("=")
    if interface.startswith("=") and "," not in exact:
        # Gloo and torch's TensorPipe take exact names alone, no prefixes and no exclusions.
        variables |= {"GLOO_SOCKET_IFNAME": exact, "TP_SOCKET_IFNAME": exact}
    return variables


def _check(spec: RLJobSpec) -> None:
    if spec.hccl.op_expansion_mode == "AIV" and spec.hccl.deterministic:
        raise RenderError(
            "spec.hccl.opExpansionMode",
            "AIV and spec.hccl.deterministic exclude each other: with HCCL_DETERMINISTIC, HCCL ignores AIV on A2 and "
            "is deterministic for small messages alone on A3; take another mode, or set deterministic to false",
        )
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
