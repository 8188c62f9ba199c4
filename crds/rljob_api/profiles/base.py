"""Hardware profiles: all that differs between kinds of devices, as data.

Nothing outside of this folder asks for a profile by its name, and nothing in the operator asks for the kind of device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["npu", "cuda", "cpu"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]

BACKEND_AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""With 0, importing torch does not load torch_npu, which needs the Ascend driver's libraries."""
NO_ASYNC_SCHEDULING = "one batch more may be in flight when the engine goes to sleep, and that was never tried"
"""Why vLLM's default on devices, `async_scheduling`, is off (vllm/config/vllm.py of 0.23)."""


@dataclass(frozen=True, slots=True)
class HostMount:
    """A file or folder of the node that the pods see, read-only."""

    path: str
    """In the pod."""
    kind: str
    """`type` of the hostPath volume: a missing file then fails the pod with a message, instead of becoming a folder."""
    source: str = ""
    """On the node; empty: the same path."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Variables that Ascend users tune by hand; None leaves the library's own default."""

    task_queue_enable: int | None = None
    cpu_affinity: str | None = None
    multi_stream_memory_reuse: int | None = None
    combined_enable: bool | None = None
    omp_num_threads: int | None = None
    compile_cache: bool = False
    compile_cache_path: str | None = None
    compile_cache_mib: int | None = None
    log_level: LogLevel | None = None


@dataclass(frozen=True, slots=True)
class MindCluster:
    """Settings for MindCluster's scheduler (Volcano with the Ascend plugin) about these devices."""

    visible_devices_annotation: str | None = None
    """Pod annotation in which it writes the devices that it chose."""
    ring_controller: str | None = None
    """`ring-controller.atlas`, which MindCluster requires on its pods."""
    schedule_policy: str | None = None
    """`huawei.com/schedule_policy`: how devices of a server are wired."""
    super_pods: bool = False
    """Whether servers can be parts of a SuperPoD."""
    multiple: int = 1
    """Devices of a node are given out in multiples of this."""


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """One kind of device in one kind of cluster."""

    name: str
    """`spec.resources.profile`; the file has the same name, with underscores."""
    order: int
    """Place in lists."""
    kind: Kind
    """Library that computes on it."""
    chip: str | None
    """Chip in `rljob_api.hardware.CHIP_MEMORY_GIB`; None: the profile does not say."""
    resource_name: str | None
    """Extended resource; none: processes without devices."""
    ray_resource: str | None
    """Ray's resource for one device."""
    devices_per_node: int | None
    """Devices of the largest server of this kind; more on one node is refused. None: not known."""
    cpu_per_device: int
    """Cores of a worker pod for each device."""
    memory_per_device_gib: int
    """Host memory of a worker pod for each device."""
    shared_memory_per_device_gib: int
    """/dev/shm; part of the former."""
    head_cpu: str
    head_memory: str
    node_selector: Mapping[str, str] = field(default_factory=dict)
    host_mounts: tuple[HostMount, ...] = ()
    head_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the head pod, which has no devices."""
    engine_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of engine processes."""
    returns_experts: bool = True
    """Whether an engine tells the experts of each token (`rollout.routerReplay`)."""
    verifies_drafts: bool = True
    """Whether an engine's guesses (`rollout.speculative`) can be verified so that they change no token."""
    refused_engine_args: Mapping[str, str] = field(default_factory=dict)
    """vLLM arguments that must stay off on it -> why."""
    allocator_variable: str | None = None
    """Variable that configures the device allocator."""
    explicit_devices_variable: str | None = None
    """Variable that keeps Ray from showing a process the devices of its own bundle alone."""
    runtime_class: str | None = None
    restricted: bool = False
    """Run as an ordinary user without capabilities. Ascend's device files belong to a group of the node."""
    device_group: int | None = None
    """Group of the node that its device files belong to; pods with devices are members."""
    needs_cann: bool = False
    """The containers' shell sets CANN up before anything else runs."""
    uses_hccl: bool = False
    """Collectives of its devices are HCCL's."""
    visible_devices_variable: str | None = None
    """Variable that a container runtime reads its devices from; filled from the annotation below."""
    visible_devices_annotation: str | None = None
    """Pod annotation with the devices that a scheduler chose. Profiles leave it empty: the job's scheduler and its
    overrides decide (`rljob_operator.render.hardware`)."""
    init_containers_share_devices: bool = True
    """Whether an init container may ask for the pod's devices and is handed the same ones."""
    mind_cluster: MindCluster | None = None
    """None: MindCluster does not know these devices."""
    tuning: Tuning = Tuning()
    tunable: tuple[str, ...] = ("omp_num_threads",)
    """Fields of `resources.tuning` that mean something on it."""

    @property
    def has_devices(self) -> bool:
        """Whether Kubernetes counts devices of this kind."""
        return self.resource_name is not None
