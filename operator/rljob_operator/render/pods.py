"""Pod templates of head and workers.

Source: KubeRay's pod.go (1.5.1 and 1.6.2). It puts `ray start` behind the container's command, copies the container's
environment and mounts into an init container, adds service addresses, and leaves what is set here alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rljob_api import derived
from rljob_api.derived import NodeGroup
from rljob_api.json_types import Json
from rljob_api.profiles import HardwareProfile
from rljob_api.quantities import mebibytes, to_number
from rljob_api.spec import RLJobSpec
from rljob_api.wire.names import DRIVER_TOKEN_KEY, DRIVER_TOKEN_VARIABLE
from rljob_operator.kubernetes_objects import Manifest
from rljob_operator.render.cann import cann_environment
from rljob_operator.render.errors import RenderError
from rljob_operator.render.init_container import cache_containers, init_containers
from rljob_operator.render.ports import ray_ports
from rljob_operator.render.scheduling import placement, pod_annotations, pod_labels
from rljob_operator.render.settings import RenderSettings
from rljob_operator.render.variables import pod_environment, secret_environment
from rljob_operator.render.volumes import Volumes, head_volumes, worker_volumes

JOB_LABEL = "rljob.dev/job"
_EXTRA_GRACE_SECONDS = 30
_LEAST_MEMORY = 2**28
_USER = 1000


@dataclass(frozen=True, slots=True)
class PodSize:
    """Resources of a pod; requests equal limits (the device plugins of Ascend insist on it for devices)."""

    cpu: str
    memory: str
    shared_memory: str
    """Size of /dev/shm, part of `memory`."""
    devices: int = 0

    def resources(self, resource_name: str | None) -> dict[str, Json]:
        """`resources` of the Ray container."""
        amounts = {"cpu": self.cpu, "memory": self.memory}
        if self.devices and resource_name is not None:
            amounts[resource_name] = str(self.devices)
        return {"limits": dict(amounts), "requests": dict(amounts)}

    def object_store_bytes(self) -> str:
        """Half of /dev/shm for Ray's object store; the rest is the weight hand-over's and vLLM's."""
        return str(to_number(self.shared_memory) // 2)


def head_size(spec: RLJobSpec, profile: HardwareProfile) -> PodSize:
    """The head's size."""
    memory = spec.resources.head.memory or profile.head_memory
    return PodSize(
        spec.resources.head.cpu or profile.head_cpu, memory, mebibytes(max(to_number(memory) // 4, _LEAST_MEMORY))
    )


def worker_size(spec: RLJobSpec, profile: HardwareProfile, group: NodeGroup) -> PodSize:
    """Size of a worker of a group: what its devices need, unless the job says it."""
    devices, given = group.devices, group.worker
    memory = given.memory or f"{profile.memory_per_device_gib * devices}Gi"
    shared = spec.storage.shared_memory
    if shared is None:
        usual = profile.shared_memory_per_device_gib * devices * 2**30
        shared = mebibytes(min(usual, to_number(memory) // 2))
    return PodSize(given.cpu or str(profile.cpu_per_device * devices), memory, shared, devices)


def check_sizes(spec: RLJobSpec, profile: HardwareProfile) -> None:
    """Refuse pods that are too small for Ray, and a /dev/shm that does not fit."""
    _check_memory("spec.resources.head", head_size(spec, profile))
    for group in derived.node_groups(spec):
        worker = worker_size(spec, profile, group)
        _check_memory(f"spec.{group.worker_field}", worker)
        if not 0 < to_number(worker.shared_memory) <= to_number(worker.memory):
            raise RenderError(
                "spec.storage.sharedMemory",
                f"{worker.shared_memory}: /dev/shm is part of the worker's memory ({worker.memory}): above 0 and at "
                "most that",
            )


def _check_memory(field: str, size: PodSize) -> None:
    if to_number(size.memory) < _LEAST_MEMORY:
        raise RenderError(f"{field}.memory", f"{size.memory}: a Ray pod needs more; at least 256Mi")


def head_template(
    job: str, spec: RLJobSpec, profile: HardwareProfile, settings: RenderSettings, secret: str
) -> Manifest:
    """Pod template of the head: Ray's control processes and the driver, no devices and no actors."""
    size = head_size(spec, profile)
    container = _container("ray-head", spec, profile, settings, size)
    token = {"secretKeyRef": {"name": secret, "key": DRIVER_TOKEN_KEY}}
    container["env"] = [
        *pod_environment(spec, profile, head=True),
        {"name": DRIVER_TOKEN_VARIABLE, "valueFrom": token},
    ]
    container["ports"] = [
        {"name": "gcs-server", "containerPort": settings.gcs_port},
        {"name": "dashboard", "containerPort": settings.dashboard_port},
        {"name": "client", "containerPort": settings.client_port},
        {"name": "driver", "containerPort": settings.driver_port},
    ]
    container |= _probes("/api/gcs_healthz", settings.dashboard_port)
    return _template(job, spec, profile, container, head_volumes(spec, size.shared_memory), None)


def worker_template(
    job: str, spec: RLJobSpec, profile: HardwareProfile, settings: RenderSettings, group: NodeGroup
) -> Manifest:
    """Pod template of a worker of a group: all devices of one node."""
    size = worker_size(spec, profile, group)
    container = _container("ray-worker", spec, profile, settings, size)
    container["resources"] = size.resources(profile.resource_name)
    container["env"] = pod_environment(spec, profile, head=False)
    ports = ray_ports(spec, settings, group)
    if ports.declared():
        container["ports"] = ports.declared()
    container |= _probes("/api/local_raylet_healthz", ports.agent)
    volumes = worker_volumes(spec, profile, size.shared_memory)
    ray = {key: value for key, value in container.items() if key != "ports"} | {"volumeMounts": volumes.mounts}
    before = [*cache_containers(profile, ray), *init_containers(spec, profile, group, ray)]
    return _template(job, spec, profile, container, volumes, group, init_containers=before)


def _container(
    name: str, spec: RLJobSpec, profile: HardwareProfile, settings: RenderSettings, size: PodSize
) -> dict[str, Json]:
    container: dict[str, Json] = {
        "name": name,
        "image": settings.image(spec),
        "imagePullPolicy": spec.pods.image_pull_policy,
        "resources": size.resources(None),
        "securityContext": _container_security(profile),
    }
    if profile.needs_cann:
        container["command"] = [cann_environment()]
    if spec.environment.secrets:
        container["envFrom"] = secret_environment(spec)
    return container


def _probes(path: str, port: int) -> dict[str, Json]:
    # KubeRay's own need wget in the image before Ray 2.53. These two paths answer without a token.
    # The start and the liveness are as patient as KubeRay's, ten minutes: a busy node must not cost a training run.
    return {
        probe: {"httpGet": {"path": path, "port": port}, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": n}
        for probe, n in (("startupProbe", 120), ("readinessProbe", 10), ("livenessProbe", 120))
    }


def _template(
    job: str,
    spec: RLJobSpec,
    profile: HardwareProfile,
    container: dict[str, Json],
    volumes: Volumes,
    group: NodeGroup | None,
    *,
    init_containers: Sequence[Manifest] = (),
) -> Manifest:
    head = group is None
    container["volumeMounts"] = volumes.mounts
    metadata: dict[str, Json] = {"labels": {**spec.pods.labels, **own_labels(job, spec, profile)}}
    annotations = {**pod_annotations(spec, profile, head=head), **spec.pods.annotations}
    if annotations:
        metadata["annotations"] = annotations
    grace = spec.pods.termination_grace_seconds
    pod: dict[str, Json] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace or math.ceil(spec.checkpoint.grace_seconds) + _EXTRA_GRACE_SECONDS,
        "securityContext": _pod_security(profile, head=head),
        **placement(spec, profile, job, group),
        "containers": [container],
        "volumes": volumes.volumes,
    }
    if init_containers:
        pod["initContainers"] = list(init_containers)
    if spec.pods.service_account is not None:
        pod["serviceAccountName"] = spec.pods.service_account
    if spec.pods.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in spec.pods.image_pull_secrets]
    if not head:
        if profile.runtime_class is not None:
            pod["runtimeClassName"] = profile.runtime_class
        if spec.network.host_network:
            pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return {"metadata": metadata, "spec": pod}


def own_labels(job: str, spec: RLJobSpec, profile: HardwareProfile) -> dict[str, str]:
    """Labels that pods are found by, whatever the user's template says."""
    return {JOB_LABEL: job, **pod_labels(spec, profile)}


def _pod_security(profile: HardwareProfile, *, head: bool) -> dict[str, Json]:
    # The runtime's system-call filter is what `docker run` uses too, as in the published Ascend set-ups.
    filtered: dict[str, Json] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if not profile.restricted:
        in_group = not head and profile.device_group is not None
        return {**filtered, "supplementalGroups": [profile.device_group]} if in_group else filtered
    user = {"runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER}
    return {**filtered, **user, "fsGroupChangePolicy": "OnRootMismatch"}


def _container_security(profile: HardwareProfile) -> dict[str, Json]:
    if not profile.restricted:
        return {"allowPrivilegeEscalation": False}
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
