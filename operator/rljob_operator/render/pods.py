"""Pod templates of head and workers.

Source: KubeRay's pod.go (1.5.1 and 1.6.2). It puts `ray start` behind the container's command, copies the container's
environment and mounts into an init container, adds service addresses, and leaves what is set here alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rljob_api import derived
from rljob_api.quantities import mebibytes, to_number
from rljob_api.spec import RLJobSpec
from rljob_operator.render import names
from rljob_operator.render.cann import cann_environment
from rljob_operator.render.doctor import init_containers
from rljob_operator.render.errors import RenderError
from rljob_operator.render.merge import merge
from rljob_operator.render.profiles import HardwareProfile
from rljob_operator.render.scheduling import placement, pod_annotations, pod_labels
from rljob_operator.render.settings import RenderSettings, short
from rljob_operator.render.variables import pod_environment, secret_environment
from rljob_operator.render.volumes import Volumes, head_volumes, worker_volumes

DRIVER_TOKEN_VARIABLE = "RLJOB_DRIVER_TOKEN"
JOB_LABEL = "rljob.dev/job"
_EXTRA_GRACE_SECONDS = 30
_USER = 1000


@dataclass(frozen=True, slots=True)
class PodSize:
    """What a pod asks for; requests equal limits (the device plugins of Ascend insist on it for devices)."""

    cpu: str
    memory: str
    shared_memory: str
    """Size of /dev/shm, part of `memory`."""
    devices: int = 0

    def resources(self, resource_name: str | None) -> dict[str, Any]:
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
    _positive("spec.resources.head.memory", memory)
    return PodSize(spec.resources.head.cpu or profile.head_cpu, memory, mebibytes(max(to_number(memory) // 4, 2**28)))


def worker_size(spec: RLJobSpec, profile: HardwareProfile) -> PodSize:
    """A worker's size: what its devices need, unless the job says it."""
    devices = derived.devices_per_node(spec)
    given = spec.resources.worker
    memory = given.memory or f"{profile.memory_per_device_gib * devices}Gi"
    _positive("spec.resources.worker.memory", memory)
    shared = spec.storage.shared_memory
    if shared is None:
        usual = profile.shared_memory_per_device_gib * devices * 2**30
        shared = mebibytes(min(usual, to_number(memory) // 2))
    elif not 0 < to_number(shared) <= to_number(memory):
        raise RenderError(
            "spec.storage.sharedMemory",
            f"{shared}: /dev/shm is part of the worker's memory ({memory}): above 0 and at most that",
        )
    return PodSize(given.cpu or str(profile.cpu_per_device * devices), memory, shared, devices)


def _positive(field: str, quantity: str) -> None:
    if to_number(quantity) < 2**28:
        raise RenderError(field, f"{quantity}: a Ray pod needs more; at least 256Mi")


def head_template(
    job: str, spec: RLJobSpec, profile: HardwareProfile, settings: RenderSettings, secret: str
) -> dict[str, Any]:
    """Pod template of the head: Ray's control processes and the driver, no devices and no actors."""
    size = head_size(spec, profile)
    container = _container("ray-head", spec, profile, settings, size)
    token = {"secretKeyRef": {"name": secret, "key": "token"}}
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
    return _template(job, spec, profile, container, head_volumes(spec, size.shared_memory), head=True)


def worker_template(job: str, spec: RLJobSpec, profile: HardwareProfile, settings: RenderSettings) -> dict[str, Any]:
    """Pod template of a worker: all devices of one node."""
    size = worker_size(spec, profile)
    container = _container("ray-worker", spec, profile, settings, size)
    container["resources"] = size.resources(profile.resource_name)
    container["env"] = pod_environment(spec, profile, head=False)
    container |= _probes("/api/local_raylet_healthz", settings.agent_port)
    volumes = worker_volumes(spec, profile, size.shared_memory)
    examination = init_containers(spec, profile, {**container, "volumeMounts": volumes.mounts})
    return _template(job, spec, profile, container, volumes, head=False, init_containers=examination)


def _container(
    name: str, spec: RLJobSpec, profile: HardwareProfile, settings: RenderSettings, size: PodSize
) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": name,
        "image": settings.image(spec.image, spec.resources.profile),
        "imagePullPolicy": spec.pods.image_pull_policy,
        "resources": size.resources(None),
        "securityContext": _container_security(profile),
    }
    if profile.kind == "npu":
        container["command"] = [cann_environment()]
    if spec.environment.secrets:
        container["envFrom"] = secret_environment(spec)
    return container


def _probes(path: str, port: int) -> dict[str, Any]:
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
    container: dict[str, Any],
    volumes: Volumes,
    *,
    head: bool,
    init_containers: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    _check_given(spec, profile)
    container["volumeMounts"] = volumes.mounts
    own_labels = {JOB_LABEL: job, **pod_labels(spec, profile)}
    metadata: dict[str, Any] = {"labels": {**spec.pods.labels, **own_labels}}
    annotations = {**pod_annotations(spec, profile, head=head), **spec.pods.annotations}
    if annotations:
        metadata["annotations"] = annotations
    grace = spec.pods.termination_grace_seconds
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace or math.ceil(spec.checkpoint.grace_seconds) + _EXTRA_GRACE_SECONDS,
        "securityContext": _pod_security(profile),
        **placement(spec, profile, job, head=head),
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
    return _with_override({"metadata": metadata, "spec": pod}, spec, own_labels, head=head)


def _with_override(
    template: dict[str, Any], spec: RLJobSpec, own_labels: dict[str, str], *, head: bool
) -> dict[str, Any]:
    field = "spec.pods.head" if head else "spec.pods.worker"
    given = spec.pods.head if head else spec.pods.worker
    for key in given:
        if key not in ("metadata", "spec"):
            raise RenderError(field, f"{short(key)} is no part of a pod template: metadata and spec are")
    merged = merge(template, given, field)
    metadata = merged.get("metadata", {})
    labels = _strings(metadata, f"{field}.metadata", "labels")
    added = {key: value for key, value in labels.items() if key not in own_labels}
    names.check_labels(f"{field}.metadata.labels", added, own=True)
    names.check_annotations(f"{field}.metadata.annotations", _strings(metadata, f"{field}.metadata", "annotations"))
    _check_parts(merged.get("spec", {}), f"{field}.spec", template["spec"]["containers"][0]["name"])
    # Pods are found by these, whatever the user's template says.
    merged["metadata"] = {**metadata, "labels": {**labels, **own_labels}}
    return merged


def _strings(metadata: dict[str, Any], field: str, part: str) -> dict[str, str]:
    values = metadata.get(part, {})
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise RenderError(f"{field}.{part}", "is no mapping of strings to strings")
    return values


def _check_parts(pod: dict[str, Any], field: str, ray: str) -> None:
    containers = pod.get("containers") or [{}]
    if containers[0].get("name") != ray:
        raise RenderError(f"{field}.containers", f"the first container is Ray's, {ray}, and cannot be deleted")
    for part in ("containers", "initContainers", "volumes"):
        for item in pod.get(part, []):
            name = item["name"]
            if "." in name or len(name) > 63 or not names.is_subdomain(name):
                raise RenderError(f"{field}.{part}", f"{short(name)} is no name: lower-case letters, digits and '-'")


def _check_given(spec: RLJobSpec, profile: HardwareProfile) -> None:
    names.check_labels("spec.pods.labels", spec.pods.labels, own=True)
    names.check_annotations("spec.pods.annotations", spec.pods.annotations)
    names.check_name("spec.pods.serviceAccount", spec.pods.service_account)
    names.check_name("spec.resources.overrides.runtimeClass", profile.runtime_class)
    for i, name in enumerate(spec.pods.image_pull_secrets):
        names.check_name(f"spec.pods.imagePullSecrets[{i}]", name)
    if profile.visible_devices_annotation is not None:
        names.check_label_key("spec.resources.overrides.visibleDevicesAnnotation", profile.visible_devices_annotation)
    if profile.resource_name is not None:
        names.check_label_key("spec.resources.overrides.resourceName", profile.resource_name)


def _pod_security(profile: HardwareProfile) -> dict[str, Any]:
    # The runtime's system-call filter is what `docker run` uses too, as in the published Ascend set-ups.
    filtered: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if not profile.restricted:
        return filtered
    user = {"runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER}
    return {**filtered, **user, "fsGroupChangePolicy": "OnRootMismatch"}


def _container_security(profile: HardwareProfile) -> dict[str, Any]:
    if not profile.restricted:
        return {"allowPrivilegeEscalation": False}
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
