"""Faults of a job's pods that no cluster accepts, as far as the manifest alone shows them: names, devices, mounts,
sizes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from rljob_api import derived
from rljob_api import kubernetes_names as names
from rljob_api.hardware import device_memory
from rljob_api.how_many import how_many
from rljob_api.profiles import PROFILES
from rljob_api.profiles.base import MindCluster
from rljob_api.quantities import to_cores, to_number
from rljob_api.rules.findings import LABEL_KEY, LABEL_VALUE, Check, Finding, object_name
from rljob_api.spec import ProfileOverrides, QueueSystem, RLJobSpec, SchedulingSpec, Toleration, TuningSpec, VolumeSpec

OWN_VOLUMES = "rljob-"
"""Names of volumes that begin with it are the operator's."""
COMPILE_CACHE = "/var/cache/rljob/operators"
"""Folder of compiled operators in the pod."""
_AFFINITIES = ("nodeAffinity", "podAffinity", "podAntiAffinity")
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_RAY_RESOURCE = "letters, digits, '_', '-' and '.', a letter first"


PROCESSES_PER_CORE = 16
"""Most that a node without devices may run on each core: with more of them nothing gets on."""
PROCESS_BYTES = 2**28
"""Least bytes of a trainer or an engine on the CPU: Python with torch."""


def too_many_processes(group: derived.NodeGroup, tensor_parallel: int, cores: int) -> tuple[str, str] | None:
    """(what is wrong, what is allowed) of trainers and engines on a node without devices; None: nothing."""
    processes, most = group.trainers + group.engine_devices + group.judge_devices, PROCESSES_PER_CORE * cores
    if processes <= most:
        return None
    engines = group.engine_devices // tensor_parallel
    judges = f", {how_many(group.judge_devices, 'process', 'processes')} of a judge" if group.judge_devices else ""
    wrong = (
        f"{how_many(group.trainers, 'trainer')} and {how_many(engines, 'engine')}{judges} are {processes} processes, "
    )
    wrong += f"for {how_many(cores, 'core')}"
    return wrong, f"at most {PROCESSES_PER_CORE} on each core, {most}"


def _path(at: tuple[str | int, ...], path: str | None) -> Iterator[Finding]:
    if path is not None and (
        not path.startswith("/") or ":" in path or not path.isprintable() or ".." in path.split("/")
    ):
        yield Finding(at, "is no path to mount", "absolute, without ':' and '..'")


def _toleration(toleration: Any) -> Iterator[Finding]:
    if toleration.key is not None and not names.is_label_key(toleration.key):
        yield Finding(("key",), "is no key of a taint", LABEL_KEY)
    if toleration.value is not None and not names.is_label_value(toleration.value):
        yield Finding(("value",), "is no value of a taint", LABEL_VALUE)


def _scheduling(scheduling: Any) -> Iterator[Finding]:
    if scheduling.system == QueueSystem.KUEUE and scheduling.queue is not None:
        yield from object_name(("queue",), scheduling.queue, "queue of Kueue")
    for key, value in scheduling.affinity.items():
        if key in _AFFINITIES and value is not None and not isinstance(value, dict):
            yield Finding(("affinity", key), "is no mapping", "a mapping, as in a pod")
    apart = scheduling.affinity.get("podAntiAffinity")
    if isinstance(apart, dict) and not isinstance(apart.get(_REQUIRED) or [], list):
        yield Finding(("affinity", "podAntiAffinity", _REQUIRED), "is no list", "a list, as in a pod")


def _overrides(overrides: Any) -> Iterator[Finding]:
    for field, name in (
        ("resourceName", overrides.resource_name),
        ("visibleDevicesAnnotation", overrides.visible_devices_annotation),
    ):
        if name is not None and not names.is_label_key(name):
            yield Finding((field,), "is no such name", LABEL_KEY)
    ray = overrides.ray_resource
    if ray is not None and not (ray[0].isalpha() and ray.isascii() and ray.translate(_PLAIN).isalnum()):
        yield Finding(("rayResource",), "is no name of a Ray resource", _RAY_RESOURCE)
    yield from object_name(("runtimeClass",), overrides.runtime_class, "runtime class")
    yield from _path(("driverPath",), overrides.driver_path)
    for i, path in enumerate(overrides.host_mounts or []):
        yield from _path(("hostMounts", i), path)


_PLAIN = str.maketrans("", "", "_.-")


def _tuning(tuning: Any) -> Iterator[Finding]:
    yield from _path(("compileCachePath",), tuning.compile_cache_path)


def _volume(volume: Any) -> Iterator[Finding]:
    if volume.name.startswith(OWN_VOLUMES):
        yield Finding(("name",), f"names that begin with {OWN_VOLUMES} are the operator's", "another name")


def _mounts(spec: Any) -> Iterator[Finding]:
    """Two things in one place of a worker pod."""
    profile, given = PROFILES[spec.resources.profile], spec.resources.overrides.host_mounts
    seen = {PurePosixPath("/dev/shm"): "storage.sharedMemory"}
    for i, path in enumerate(given if given is not None else [mount.path for mount in profile.host_mounts]):
        if given is not None and PurePosixPath(path) in seen:
            where = ("resources", "overrides", "hostMounts", i)
            yield Finding(where, f"is mounted already: {seen[PurePosixPath(path)]}", "another place")
        seen.setdefault(PurePosixPath(path), "resources.overrides.hostMounts" if given else f"profile {profile.name}")
    if profile.tuning.compile_cache and spec.resources.tuning.compile_cache:
        seen[PurePosixPath(COMPILE_CACHE)] = "resources.tuning.compileCache"
    for i, volume in enumerate(spec.storage.volumes):
        path = PurePosixPath("/" + volume.mount_path.lstrip("/"))
        # Two volumes that name a place alike are another rule's.
        if path in seen and volume.mount_path not in [other.mount_path for other in spec.storage.volumes[:i]]:
            yield Finding(("storage", "volumes", i, "mountPath"), f"is mounted already: {seen[path]}", "another place")
        seen.setdefault(path, f"storage.volumes[{i}]")


def _devices(spec: Any) -> Iterator[Finding]:
    """More devices than a server has, or others than MindCluster gives out."""
    profile = PROFILES[spec.resources.profile]
    mind_cluster = profile.mind_cluster or MindCluster()
    for group in derived.node_groups(spec):
        own = group.worker_field.split(".")[1:-1] or (["rollout"] if derived.divides_devices(spec) else [])
        at = ("resources", *own, "devicesPerNode")
        judges = f" ({group.judge_devices} of a judge alone)" if group.judge_devices else ""
        if profile.devices_per_node is not None and group.devices > profile.devices_per_node:
            wrong = (
                f"{how_many(group.devices, 'device')} on a node{judges}: servers of profile {profile.name} have fewer"
            )
            if not profile.has_devices:
                engines = group.engine_devices // spec.rollout.tensor_parallel
                processes = f"{how_many(group.trainers, 'trainer')} and {how_many(engines, 'engine')}"
                wrong = f"{processes} on a node: no server runs as many"
            yield Finding(at, wrong, f"at most {profile.devices_per_node}, on more nodes")
        multiple = mind_cluster.multiple
        if spec.scheduling.system == QueueSystem.MIND_CLUSTER and group.devices % multiple:
            wrong = (
                f"{how_many(group.devices, 'device')} on a node{judges}: MindCluster gives out those of {profile.name} "
                f"{multiple} at a time"
            )
            yield Finding(at, wrong, f"a multiple of {multiple}")
    per_node, block = derived.devices_per_node(spec), spec.scheduling.super_pod_block
    devices = derived.devices(spec)
    if block is None or spec.scheduling.system != QueueSystem.MIND_CLUSTER:
        return
    if not mind_cluster.super_pods:
        able = " and ".join(name for name, p in PROFILES.items() if p.mind_cluster and p.mind_cluster.super_pods)
        yield Finding(("scheduling", "superPodBlock"), f"only profiles {able} know SuperPoDs", "leave it out")
    elif block % per_node or devices % block:
        allowed = f"a multiple of the {how_many(per_node, 'device')} of a node that divides the job's {devices}"
        yield Finding(("scheduling", "superPodBlock"), "does not fit the job's devices", allowed)


def _caches(spec: Any) -> Iterator[Finding]:
    """KV caches that are larger than what they lie in."""
    cache, at = spec.rollout.kv_cache_bytes, ("rollout", "kvCacheBytes")
    if cache is None:
        return
    if PROFILES[spec.resources.profile].has_devices:
        return
    for group in derived.node_groups(spec):
        caches, memory = cache * group.engine_devices, group.worker.memory
        if memory is not None and caches >= to_number(memory):
            wrong = f"{group.engine_devices} of them are {caches} bytes, the pod's memory {memory}"
            yield Finding(at, wrong, f"less, or a larger {group.worker_field}.memory")


def _device_bytes(spec: Any) -> Iterator[Finding]:
    """Amounts that are more than a whole device has."""
    device = device_memory(spec)
    amounts = {
        ("rollout", "kvCacheBytes"): spec.rollout.kv_cache_bytes or 0,
        ("memorySaver", "trainMemoryMargin"): to_number(spec.memory_saver.train_memory_margin),
        ("weightSync", "bucketBytes"): 2 * spec.weight_sync.bucket_bytes,
        ("hccl", "bufferSizeMb"): 2 * 2**20 * (spec.hccl.buffer_size_mb or 0),
    }
    for at, nbytes in amounts.items():
        if device is not None and nbytes >= device.nbytes:
            wrong = f"takes {nbytes} bytes of a device, which has {device.nbytes} ({device.source})"
            yield Finding(at, wrong, "less than that")


def _processes(spec: Any) -> Iterator[Finding]:
    """More processes than the pod's cores can run, where the CPU stands for devices."""
    if PROFILES[spec.resources.profile].has_devices:
        return
    for group in derived.node_groups(spec):
        if group.worker.cpu is None:
            continue
        wrong = too_many_processes(group, spec.rollout.tensor_parallel, to_cores(group.worker.cpu))
        if wrong:
            yield Finding((*group.worker_field.split("."), "cpu"), *wrong)


def _shared_memory(spec: Any) -> Iterator[Finding]:
    if spec.storage.shared_memory is None:
        return
    profile = PROFILES[spec.resources.profile]
    for group in derived.node_groups(spec):
        memory = group.worker.memory or f"{profile.memory_per_device_gib * group.devices}Gi"
        if to_number(spec.storage.shared_memory) > to_number(memory):
            wrong = f"/dev/shm is part of the worker's memory ({memory})"
            yield Finding(("storage", "sharedMemory"), wrong, "at most that")


CLUSTER_CHECKS: dict[type, tuple[Check, ...]] = {
    Toleration: (_toleration,),
    SchedulingSpec: (_scheduling,),
    ProfileOverrides: (_overrides,),
    TuningSpec: (_tuning,),
    VolumeSpec: (_volume,),
    RLJobSpec: (_mounts, _devices, _shared_memory, _caches, _device_bytes, _processes),
}
