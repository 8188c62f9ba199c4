"""Hardware profiles: what differs between kinds of devices, as data. Nothing else in the operator knows a device.

Sources, named at each value:
  MindCluster      Ascend/mind-cluster at 22bb3d9: device plugin, Docker runtime, scheduler and their documentation
  vllm-ascend CI   tests/e2e/nightly/multi_node/scripts of vllm-project/vllm-ascend, 2026-08
  ROLL             its Ascend guide of 2026-04-27 (docker run lines and environment for A2 and A3)
  vime 255         colocated GRPO on 8 x 910B1, vllm-project/vime issue 255
  torch_npu        Ascend/pytorch, docs/zh/environment_variable_reference, 7.3.0
  CANN             hiascend.com, environment variable reference of CANN 8.5 and 9.0
  chosen           no source; a value that leaves room on the usual server
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from rljob_api.hardware import HOST_MEMORY
from rljob_api.spec import Profile, ProfileOverrides, RLJobSpec, TuningSpec

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
DRIVER = "/usr/local/Ascend/driver"
"""Folder of the Ascend driver in the pod, and on the node unless `overrides.driverPath` says otherwise."""


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
class HardwareProfile:
    """One kind of device."""

    kind: Literal["npu", "cuda", "cpu"]
    resource_name: str | None
    """Extended resource; none: processes without devices."""
    ray_resource: str | None
    """Ray's resource for one device."""
    devices_per_node: int | None
    """Devices of the largest server of this kind; more on one node is refused. None: not known."""
    cpu_per_device: int
    memory_per_device_gib: int
    """This and the next: from `rljob_api.hardware`, which `rljob plan` reads too."""
    shared_memory_per_device_gib: int
    head_cpu: str
    head_memory: str
    node_selector: Mapping[str, str] = field(default_factory=dict)
    host_mounts: tuple[HostMount, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Pod-wide, head and workers."""
    head_environment: Mapping[str, str] = field(default_factory=dict)
    runtime_class: str | None = None
    restricted: bool = False
    """Run as an ordinary user without capabilities. Ascend's device files belong to a group of the node."""
    visible_devices_annotation: str | None = None
    """Pod annotation with the devices that the MindCluster scheduler chose."""
    ring_controller: str | None = None
    """`ring-controller.atlas`, by which MindCluster knows its pods."""
    schedule_policy: str | None = None
    """`huawei.com/schedule_policy`: how devices of a server are wired."""
    super_pods: bool = False
    """Whether servers can be parts of a SuperPoD."""
    tuning: Tuning = Tuning()


_NPU_HEAD = {
    # MindCluster: switches the Docker runtime's hook off, so that a pod without devices gets none.
    "ASCEND_VISIBLE_DEVICES": "void",
    # Importing torch loads torch_npu, which needs the driver's libraries; the head has none and uses no device.
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}
_NPU_MOUNTS = (
    # ROLL mounts these five; MindCluster's job YAML mounts driver and add-ons although its runtime mounts driver/lib64.
    # The whole driver folder holds `tools` with hccn_tool, which the runtime's list lacks.
    HostMount(DRIVER, "Directory"),
    # Newer drivers have no add-ons; an empty folder does no harm.
    HostMount("/usr/local/Ascend/add-ons", "DirectoryOrCreate"),
    HostMount("/usr/local/dcmi", "Directory"),
    HostMount("/usr/local/bin/npu-smi", "File"),
    HostMount("/etc/ascend_install.info", "File"),
    # hccn_tool reads the NPUs' network addresses here (vllm-ascend, multi-node guide).
    HostMount("/etc/hccn.conf", "File"),
)
_NPU_TUNING = Tuning(
    # ROLL: 2; torch_npu's default is 1. Level 2 moves workspace allocation to a thread of its own, which the preload
    # hook covers only because TMS_INIT_ENABLE holds for all threads; `torch` mode lowers it to 1 (see `resolve`).
    task_queue_enable=2,
    # ROLL: 2 (fine). Trainer and engine of an NPU bind to the same cores, which is right: they take turns.
    cpu_affinity="2",
    # ROLL, and torch_npu's default.
    multi_stream_memory_reuse=1,
    # ROLL; off by default in torch_npu.
    combined_enable=True,
    # ROLL: 1.
    omp_num_threads=1,
    # ROLL: enable, 5000 MiB; the first request otherwise compiles operators for minutes after each start.
    compile_cache=True,
    compile_cache_mib=5000,
    # ROLL: ERROR for CANN (3), ASDOPS and ATB.
    log_level="ERROR",
)

_A2 = HardwareProfile(
    kind="npu",
    # MindCluster: one name for 910A, 910B (A2) and A3.
    resource_name="huawei.com/Ascend910",
    # Ray: _private/accelerators/npu.py.
    ray_resource="NPU",
    # Atlas 200T A2 Box16; most servers (800T A2) have 8.
    devices_per_node=16,
    # chosen: 128 of the 192 cores of an 800T A2.
    cpu_per_device=16,
    memory_per_device_gib=HOST_MEMORY[Profile.ASCEND_A2].per_device,
    shared_memory_per_device_gib=HOST_MEMORY[Profile.ASCEND_A2].shared_per_device,
    head_cpu="8",
    head_memory="32Gi",
    # MindCluster, node labels: 8-device A2 servers. Without MindCluster's labels: `overrides.nodeSelector: {}`.
    node_selector={"accelerator-type": "module-910b-8"},
    host_mounts=_NPU_MOUNTS,
    head_environment=_NPU_HEAD,
    # MindCluster: where its scheduler writes the devices it chose.
    visible_devices_annotation="huawei.com/Ascend910",
    ring_controller="ascend-910b",
    schedule_policy="chip8-node8",
    tuning=_NPU_TUNING,
)

PROFILES: Mapping[Profile, HardwareProfile] = {
    Profile.ASCEND_A2: _A2,
    Profile.ASCEND_A3: replace(
        _A2,
        # Atlas 800T A3: 8 packages of two devices.
        devices_per_node=16,
        cpu_per_device=12,
        # SuperPoD nodes are labelled module-a3-16-super-pod: `overrides.nodeSelector`.
        node_selector={"accelerator-type": "module-a3-16"},
        # MindCluster: A3 pods carry the same label as A2's; chip2-node16 is the 800T A3.
        schedule_policy="chip2-node16",
        super_pods=True,
    ),
    Profile.ASCEND_950: replace(
        _A2,
        # MindCluster: "A5 and other".
        resource_name="huawei.com/npu",
        # Atlas 850 and 950 SuperPoD.
        devices_per_node=8,
        node_selector={"accelerator": "huawei-npu"},
        visible_devices_annotation="huawei.com/npu",
        ring_controller="ascend-npu",
        schedule_policy=None,
        super_pods=True,
    ),
    Profile.CCE: replace(
        _A2,
        # Huawei Cloud CCE's AI Suite; vllm-ascend CI asks for 16 of them on A3 nodes.
        resource_name="huawei.com/ascend-1980",
        devices_per_node=16,
        cpu_per_device=12,
        # The resource is on NPU nodes alone; label values of CCE (accelerator/huawei-npu) differ by node type.
        node_selector={},
        # vllm-ascend CI on CCE mounts the tools alone: the add-on's runtime brings the driver.
        host_mounts=(HostMount(f"{DRIVER}/tools", "Directory"),),
        visible_devices_annotation=None,
        ring_controller=None,
        schedule_policy=None,
    ),
    Profile.HAMI: replace(
        _A2,
        # HAMi's device plugin has a resource for each chip: 910A, 910B2, 910B3, 910B4, 910B4-1, 910C.
        resource_name="huawei.com/Ascend910B3",
        devices_per_node=16,
        # HAMi's documentation: nodes are labelled ascend=on, and its runtime class mounts the driver.
        node_selector={"ascend": "on"},
        runtime_class="ascend",
        host_mounts=(),
        visible_devices_annotation=None,
        ring_controller=None,
        schedule_policy=None,
    ),
    Profile.CUDA: HardwareProfile(
        kind="cuda",
        # NVIDIA's device plugin; KubeRay and Ray know it.
        resource_name="nvidia.com/gpu",
        ray_resource="GPU",
        devices_per_node=16,
        cpu_per_device=12,
        memory_per_device_gib=HOST_MEMORY[Profile.CUDA].per_device,
        shared_memory_per_device_gib=HOST_MEMORY[Profile.CUDA].shared_per_device,
        head_cpu="8",
        head_memory="32Gi",
        # NVIDIA's runtime shows a container without the variable every device of the node where it is the default.
        head_environment={"NVIDIA_VISIBLE_DEVICES": "void"},
        restricted=True,
    ),
    Profile.CPU: HardwareProfile(
        kind="cpu",
        resource_name=None,
        ray_resource=None,
        devices_per_node=None,
        # chosen: two processes a device.
        cpu_per_device=2,
        memory_per_device_gib=HOST_MEMORY[Profile.CPU].per_device,
        shared_memory_per_device_gib=HOST_MEMORY[Profile.CPU].shared_per_device,
        head_cpu="2",
        head_memory="6Gi",
        restricted=True,
    ),
}


def resolve(spec: RLJobSpec) -> HardwareProfile:
    """The job's profile with `resources.overrides` and `resources.tuning` over it."""
    profile = PROFILES[spec.resources.profile]
    given = spec.resources.overrides
    tuning = profile.tuning
    if spec.memory_saver.mode == "torch" and tuning.task_queue_enable == 2:
        # The torch hook sees the calling thread alone, not the one that level 2 allocates workspaces on.
        tuning = replace(tuning, task_queue_enable=1)
    return replace(
        profile,
        resource_name=given.resource_name if profile.kind != "cpu" and given.resource_name else profile.resource_name,
        ray_resource=given.ray_resource if profile.kind != "cpu" and given.ray_resource else profile.ray_resource,
        runtime_class=given.runtime_class or profile.runtime_class,
        node_selector=given.node_selector if given.node_selector is not None else profile.node_selector,
        host_mounts=_host_mounts(profile, given),
        visible_devices_annotation=_annotation(spec, profile),
        tuning=_tuned(tuning, spec.resources.tuning),
    )


def _annotation(spec: RLJobSpec, profile: HardwareProfile) -> str | None:
    # Only MindCluster's scheduler writes the annotation; with any other one the variable would be empty (MindCluster,
    # api/ascend_job.md: it must be removed without Volcano's Ascend plugin).
    given = spec.resources.overrides.visible_devices_annotation
    if given is not None:
        return given
    return profile.visible_devices_annotation if spec.scheduling.system == "MindCluster" else None


def _host_mounts(profile: HardwareProfile, given: ProfileOverrides) -> tuple[HostMount, ...]:
    mounts = profile.host_mounts
    if given.host_mounts is not None:
        # Whether it is a file or a folder is known on the node alone.
        mounts = tuple(HostMount(path, "") for path in given.host_mounts)
    if given.driver_path is not None:
        folder = given.driver_path.rstrip("/")
        mounts = tuple(
            replace(mount, source=folder + mount.path[len(DRIVER) :])
            if mount.path == DRIVER or mount.path.startswith(f"{DRIVER}/")
            else mount
            for mount in mounts
        )
    return mounts


def _tuned(tuning: Tuning, given: TuningSpec) -> Tuning:
    chosen = {name: value for name in TuningSpec.model_fields if (value := getattr(given, name)) is not None}
    return replace(tuning, **chosen)
