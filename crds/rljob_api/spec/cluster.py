"""`spec.resources`, `spec.scheduling`, `spec.pods`, `spec.storage`, `spec.environment`, `spec.network`: where the job
runs."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rljob_api.base import (
    ApiModel,
    CpuQuantity,
    FreeForm,
    GroupSize,
    Name,
    NodeCount,
    NonNegativeInt,
    PositiveInt,
    Quantity,
    StringMap,
    Text,
    keyed_by,
)
from rljob_api.profiles import PROFILES

# --- resources ---------------------------------------------------------------------------------


if TYPE_CHECKING:

    class Profile(StrEnum):
        """Hardware profiles."""

else:
    Profile = StrEnum("Profile", {name.upper().replace("-", "_"): name for name in PROFILES}, module=__name__)
    Profile.__doc__ = "Hardware profiles."


class PodResources(ApiModel):
    """CPU and memory of a pod; requests equal limits."""

    cpu: CpuQuantity | None = None
    """CPU cores, like `32` or `500m`; default: the profile's."""
    memory: Quantity | None = None
    """Memory, /dev/shm and pinned backups included; default: the profile's."""


class TuningSpec(ApiModel):
    """Variables that Ascend users tune by hand. Each default is the profile's."""

    task_queue_enable: Annotated[int, Field(ge=0, le=2, json_schema_extra={"format": "int32"})] | None = None
    """TASK_QUEUE_ENABLE: 0 off, 1 or 2 levels of asynchronous operator launch."""
    cpu_affinity: Name | None = None
    """CPU_AFFINITY_CONF: 0 off, 1 coarse, 2 fine binding, or with ranges such as `1,npu0:0-23`."""
    multi_stream_memory_reuse: Annotated[int, Field(ge=0, le=3, json_schema_extra={"format": "int32"})] | None = None
    """MULTI_STREAM_MEMORY_REUSE."""
    combined_enable: bool | None = None
    """COMBINED_ENABLE: merge non-contiguous view operators."""
    omp_num_threads: PositiveInt | None = None
    """OMP_NUM_THREADS of each process."""
    compile_cache: bool = True
    """Keep compiled operators in a volume (ACL_OP_COMPILER_CACHE_MODE and _DIR) over restarts."""
    compile_cache_path: Text | None = None
    """Folder on the node for the cache; default: a volume that lives as long as the pod."""
    compile_cache_mib: PositiveInt | None = None
    """ASCEND_MAX_OP_CACHE_SIZE in MiB."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] | None = None
    """Log level of CANN, ASDOPS and ATB (ASCEND_GLOBAL_LOG_LEVEL, ASDOPS_LOG_LEVEL, ATB_LOG_LEVEL)."""


class ProfileOverrides(ApiModel):
    """Values that replace what the profile says."""

    resource_name: Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$", max_length=317)] | None = None
    """Extended resource that a device is asked for by, like `huawei.com/Ascend910`."""
    ray_resource: Name | None = None
    """Ray resource of one device, like `NPU`."""
    visible_devices_annotation: Name | None = None
    """Pod annotation from which ASCEND_VISIBLE_DEVICES is read (Volcano with the Ascend plugin)."""
    runtime_class: Name | None = None
    """Runtime class of the worker pods."""
    node_selector: Annotated[StringMap, Field(max_length=32)] | None = None
    """Replaces the profile's node selector; `scheduling.nodeSelector` adds to it."""
    driver_path: Text | None = None
    """Folder of the Ascend driver on the node, mounted read-only."""
    host_mounts: Annotated[list[Text], Field(max_length=32)] | None = None
    """Files and folders of the node that are mounted read-only at the same place; replaces the profile's list."""
    environment: Annotated[StringMap, Field(max_length=128)] = {}
    """Variables of the worker pods, over the profile's."""


class DeviceGroupSpec(ApiModel):
    """Devices that trainers or engines have to themselves."""

    nodes: NodeCount | None = None
    """Nodes of the group's own; default: trainers and engines are on the same machine, or in the same pod."""
    min_nodes: NodeCount | None = None
    """Fewest that `nodes` may be changed to while the job runs; default: 1 where `maxNodes` is given."""
    max_nodes: NodeCount | None = None
    """Most that `nodes` may be changed to while the job runs; default: `nodes` cannot change then."""
    devices_per_node: GroupSize | None = None
    """Devices of the group on each node; default: the fewest that hold its parallel groups."""
    worker: PodResources | None = None
    """Each worker pod of the group, where it has nodes of its own; default: `resources.worker`."""


class ResourcesSpec(ApiModel):
    """The hardware."""

    profile: Profile = Profile("ascend-a2")
    """Hardware profile: resource names, mounts and environment follow from it."""
    nodes: NodeCount = 1
    """Worker nodes."""
    devices_per_node: GroupSize | None = None
    """Devices on each node (on `cpu`: trainer processes); default: the fewest that hold every parallel group."""
    trainer: DeviceGroupSpec | None = None
    """The trainers' devices in modes `Disaggregated` and `Async`; default: the fewest that hold training's parallel
    groups."""
    rollout: DeviceGroupSpec | None = None
    """The engines' devices in modes `Disaggregated` and `Async`; default: those of one engine."""
    threads_per_device: GroupSize | None = None
    """CPU threads for each process; on `cpu` default: cores divided by devices."""
    head: PodResources = PodResources()
    """The head pod, on which the driver runs without devices."""
    worker: PodResources = PodResources()
    """Each worker pod; there is one on each node."""
    tuning: TuningSpec = TuningSpec()
    """Ascend tuning variables."""
    overrides: ProfileOverrides = ProfileOverrides()
    """Values that replace the profile's."""


# --- scheduling --------------------------------------------------------------------------------


class QueueSystem(StrEnum):
    """Queueing systems."""

    NONE = "None"
    KUEUE = "Kueue"
    VOLCANO = "Volcano"
    MIND_CLUSTER = "MindCluster"


class Toleration(ApiModel):
    """A taint that the pods tolerate."""

    key: Name | None = None
    """Taint key; none with `operator: Exists`: every taint."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Whether `value` must be equal."""
    value: Name | None = None
    """Taint value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Taint effect; none: all."""
    toleration_seconds: NonNegativeInt | None = None
    """Seconds that a `NoExecute` taint is tolerated; none: for good."""


class SchedulingSpec(ApiModel):
    """Placement of the pods."""

    system: QueueSystem = QueueSystem.NONE
    """Queueing system: `Kueue` labels, `Volcano` gangs, `MindCluster` (Volcano with Ascend annotations)."""
    queue: Name | None = None
    """Queue: Kueue's local queue or Volcano's queue."""
    priority_class: Name | None = None
    """Priority class of the pods."""
    node_selector: Annotated[StringMap, Field(max_length=32)] = {}
    """Labels that worker nodes must have, beside the profile's."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = []
    """Taints that the worker pods tolerate."""
    affinity: FreeForm = {}
    """Affinity of the worker pods, as in a pod."""
    super_pod_block: PositiveInt | None = None
    """`sp-block`: devices of one logical SuperPoD (MindCluster on ascend-a3 and ascend-950)."""


# --- pods --------------------------------------------------------------------------------------


class PodsSpec(ApiModel):
    """Settings that all pods of the job share, and the last word on each template."""

    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the image is pulled."""
    image_pull_secrets: Annotated[list[Name], Field(max_length=16)] = []
    """Names of the secrets that the image is pulled with."""
    service_account: Name | None = None
    """Service account; default: the namespace's, without a mounted token."""
    labels: Annotated[StringMap, Field(max_length=64)] = {}
    """Labels added to all pods."""
    annotations: Annotated[StringMap, Field(max_length=64)] = {}
    """Annotations added to all pods."""
    termination_grace_seconds: PositiveInt | None = None
    """Time between SIGTERM and SIGKILL; default: `checkpoint.graceSeconds` and some more."""
    doctor: Literal["Auto", "Skip"] = "Auto"
    """`Auto`: on profiles with devices an init container of each worker pod runs `rljob doctor`, and a pod with
    problems does not start; `kubectl rljob why` has them. `Skip`: no pod is examined."""
    head: FreeForm = {}
    """Pod template merged into the head's, strategically, last."""
    worker: FreeForm = {}
    """Pod template merged into the workers', strategically, last."""


class VolumeSpec(ApiModel):
    """A volume mounted into all pods: exactly one of `claim`, `hostPath` and `source`."""

    name: Annotated[str, Field(pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
    """Name of the volume."""
    mount_path: Annotated[str, Field(pattern="^/", max_length=4096)]
    """Path of the mount."""
    sub_path: Text | None = None
    """Folder inside the volume."""
    read_only: bool = False
    """Mount it read-only."""
    claim: Name | None = None
    """Persistent volume claim."""
    host_path: Annotated[str, Field(pattern="^/", max_length=4096)] | None = None
    """Folder on the node; the same storage must be there on every node."""
    source: FreeForm | None = None
    """Any other volume source, as in a pod, like `{nfs: {server: ..., path: ...}}`."""


class StorageSpec(ApiModel):
    """Models, data and checkpoints in the pods."""

    volumes: Annotated[list[VolumeSpec], Field(max_length=32, json_schema_extra=keyed_by("name"))] = []
    """Volumes mounted into all pods."""
    shared_memory: Quantity | None = None
    """Size of /dev/shm, which counts against the memory limit; default: the profile's."""


# --- environment and network -------------------------------------------------------------------


class EnvironmentSpec(ApiModel):
    """Environment variables. Those of one role reach only its processes, through Ray's runtime environment."""

    variables: Annotated[StringMap, Field(max_length=128)] = {}
    """All processes of the job."""
    trainer: Annotated[StringMap, Field(max_length=128)] = {}
    """Trainers only."""
    rollout: Annotated[StringMap, Field(max_length=128)] = {}
    """Engines only."""
    secrets: Annotated[list[Name], Field(max_length=16)] = []
    """Secrets whose keys become variables of all pods."""
    python_path: Annotated[list[Text], Field(max_length=16)] = []
    """Folders put before PYTHONPATH, for `reward.python`."""


class NetworkSpec(ApiModel):
    """Network of the pods, and access to them."""

    host_network: bool = False
    """Worker pods use the node's network."""
    network_policy: bool = True
    """Close the job's pods to everything but themselves and the operator."""
    ray_authentication: Literal["Auto", "Token", "Off"] = "Auto"
    """Token authentication of Ray's API: `Auto` uses it where KubeRay and Ray support it."""
