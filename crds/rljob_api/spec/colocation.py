"""`spec.weightSync`, `spec.memorySaver`, `spec.hccl`: sharing devices between trainer and engine."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from rljob_api.base import ApiModel, NonNegativeInt, Port, PositiveFloat, PositiveInt, Quantity


class WeightTransport(StrEnum):
    """The way of new weights from trainer to engine."""

    AUTO = "Auto"
    DISK = "Disk"
    IN_PLACE = "InPlace"


class WeightSyncSpec(ApiModel):
    """Handing new weights from trainer to engine."""

    transport: WeightTransport = WeightTransport.AUTO
    """`Auto`: memory that both share where they are on one device or host, else a broadcast (HCCL, NCCL, gloo). `Disk`,
    with devices of their own: files in the run folder, which is slower and needs no common network of devices.
    `InPlace`: engines copy from the trainers' parameters, which stay in memory, on the same device or CPU host."""
    bucket_bytes: Annotated[int, Field(ge=4096, le=2**38, json_schema_extra={"format": "int64"})] = 268435456
    """Size of one of the two staging slots in bytes; on devices at least the largest indivisible group of tensors.

    In host memory slots have at most 8 MiB, which stay in the cache, and tensors are cut between rows.
    """
    probe_every_steps: NonNegativeInt = 10
    """Compare engine and trainer log-probabilities of fixed prompts every N steps; 0 switches it off."""
    probe_tolerance: PositiveFloat | None = None
    """Largest mean absolute difference the probe accepts; default 1e-4 in fp32 (2e-3 on NPUs and GPUs), 0.1 in
    bf16. One token may differ by 20 times as much."""


class MemorySaverMode(StrEnum):
    """Hooks of the memory saver."""

    PRELOAD = "preload"
    TORCH = "torch"
    OFF = "off"


class MemorySaverSpec(ApiModel):
    """Giving the trainer's device memory back while it sleeps."""

    mode: MemorySaverMode = MemorySaverMode.PRELOAD
    """Hook of torch_memory_saver (npu, cuda). The cpu device has an arena of its own, used unless `off`."""
    train_memory_margin: Quantity = "2Gi"
    """Free device memory that must remain when the trainer wakes, and beside all that it allocates while it works."""
    release_process_groups: bool | None = None
    """Destroy the trainers' communicators while they sleep and make them again when they wake: each of HCCL's holds
    twice `hccl.bufferSizeMb` that the memory saver cannot give back. Default: on Ascend profiles."""


class PortRange(ApiModel):
    """A range of TCP ports, both ends included."""

    first: Port
    """Lowest port."""
    last: Port
    """Highest port; at least as many ports as processes share a device."""


class HcclPorts(ApiModel):
    """Ports of one role's HCCL. Trainer and engine share devices, so their ranges must not meet."""

    host: PortRange | None = None
    """HCCL_HOST_SOCKET_PORT_RANGE; default: `auto`, the system picks free ports."""
    device: PortRange | None = None
    """HCCL_NPU_SOCKET_PORT_RANGE; default: `auto`."""


class HcclSpec(ApiModel):
    """Huawei collective communication. HCCL_IF_BASE_PORT has no field: two colocated processes would bind the same
    ports."""

    interface: Annotated[str, Field(pattern=r"^\^?=?[A-Za-z0-9._-]+(,[A-Za-z0-9._-]+)*$", max_length=253)] | None = None
    """HCCL_SOCKET_IFNAME (and Gloo's): `eth` a prefix, `=eth0` exact, `^eth` excluded; default: `=eth0` in a pod
    network, HCCL's choice with `network.hostNetwork`."""
    use_host_ip: bool | None = None
    """HCCL_IF_IP from the node's address; default: with `network.hostNetwork`, unless `interface` is given."""
    trainer_ports: HcclPorts = HcclPorts()
    """Ports of the trainers."""
    rollout_ports: HcclPorts = HcclPorts()
    """Ports of the engines."""

    connect_timeout_seconds: PositiveInt = 7200
    """HCCL_CONNECT_TIMEOUT in seconds."""
    exec_timeout_seconds: PositiveInt | None = None
    """HCCL_EXEC_TIMEOUT in seconds; default: HCCL's."""
    deterministic: bool = True
    """HCCL_DETERMINISTIC."""
    buffer_size_mb: PositiveInt | None = None
    """HCCL_BUFFSIZE in MiB for each communicator; default: HCCL's 200."""
    op_expansion_mode: Literal["AI_CPU", "AIV", "HOST", "HOST_TS"] | None = None
    """HCCL_OP_EXPANSION_MODE: where collectives are scheduled; default: HCCL's own."""
