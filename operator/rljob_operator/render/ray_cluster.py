"""The RayCluster of a job."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rljob_api import derived
from rljob_api.derived import NodeGroup
from rljob_api.job import GROUP, KIND, VERSION
from rljob_api.json_types import Json
from rljob_api.profiles import HardwareProfile
from rljob_api.quantities import to_cores
from rljob_api.spec import RLJobSpec
from rljob_operator.kubernetes_objects import Manifest, block_of
from rljob_operator.render.errors import RenderError
from rljob_operator.render.pods import JOB_LABEL, head_size, worker_size
from rljob_operator.render.ports import ray_ports
from rljob_operator.render.scheduling import cluster_annotations, cluster_labels, passed_labels
from rljob_operator.render.settings import RenderSettings, short
from rljob_operator.state.observed import JobView

_OLDEST_KUBERAY = (1, 5)


def valid_spec(job: JobView) -> RLJobSpec:
    """The job's spec, which must have passed validation."""
    if job.spec is None:
        raise RenderError("spec", job.problem or "does not pass validation")
    return job.spec


def metadata(job: JobView, name: str, component: str) -> dict[str, Json]:
    """Metadata of an object that belongs to a job and goes with it."""
    owner: Manifest = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": {
            JOB_LABEL: job.name,
            "app.kubernetes.io/managed-by": "rljob-operator",
            "app.kubernetes.io/component": component,
        },
        "ownerReferences": [owner],
    }


def ray_cluster(
    job: JobView,
    spec: RLJobSpec,
    profile: HardwareProfile,
    settings: RenderSettings,
    head: Manifest,
    workers: Sequence[Manifest],
) -> Manifest:
    """The RayCluster of a job that was checked: a head without devices and one worker pod a node.

    `spec.suspend` is left out: it is Kueue's.

    Args:
        job: the job.
        spec: its spec.
        profile: its hardware.
        settings: the operator's.
        head: pod template of the head, the user's merged into it.
        workers: pod template of a worker of each group, likewise.
    """
    about = metadata(job, job.name, "cluster")
    passed = passed_labels(job.labels, settings.label_prefixes)
    about["labels"] = {**passed, **block_of(about, "labels"), **cluster_labels(spec)}
    annotations = cluster_annotations(spec, profile)
    if annotations:
        about["annotations"] = annotations
    cluster: dict[str, Json] = {
        "rayVersion": settings.ray_version,
        "headGroupSpec": {"rayStartParams": _head_start(spec, profile, settings), "template": head},
        "workerGroupSpecs": [
            _worker_group(spec, profile, settings, group, template)
            for group, template in zip(derived.node_groups(spec), workers, strict=True)
        ],
    }
    if uses_token(spec, settings):
        cluster["authOptions"] = {"mode": "token"}
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": about, "spec": cluster}


def check_ray(spec: RLJobSpec, profile: HardwareProfile, settings: RenderSettings) -> None:
    """Refuse what this KubeRay or Ray would not take."""
    kuberay = ".".join(map(str, settings.kuberay_version))
    if settings.kuberay_version[:2] < _OLDEST_KUBERAY:
        raise RenderError(
            "spec.resources", f"KubeRay {kuberay} has no resources of worker groups; 1.5 or later is needed"
        )
    if spec.network.ray_authentication == "Token" and not settings.token_authentication():
        raise RenderError(
            "spec.network.rayAuthentication",
            f"Token needs KubeRay 1.5.1 and Ray 2.52 or later; here are {kuberay} and {settings.ray_version}. "
            "Auto leaves it to the NetworkPolicy",
        )
    name = profile.ray_resource
    if name is not None and not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", name):
        raise RenderError(
            "spec.resources.overrides.rayResource",
            f"{short(name)} is no name of a Ray resource: letters, digits, '_', '-' and '.'",
        )


def uses_token(spec: RLJobSpec, settings: RenderSettings) -> bool:
    """Whether Ray's API asks for the token that KubeRay keeps in a Secret named like the cluster, key `auth_token`."""
    return spec.network.ray_authentication != "Off" and settings.token_authentication()


def _head_start(spec: RLJobSpec, profile: HardwareProfile, settings: RenderSettings) -> dict[str, str]:
    return {
        # No actor lands on the head. Its devices, were there any on the node, are none of Ray's business either.
        "num-cpus": "0",
        "num-gpus": "0",
        "object-store-memory": head_size(spec, profile).object_store_bytes(),
        "port": str(settings.gcs_port),
        "dashboard-host": "0.0.0.0",
        "dashboard-port": str(settings.dashboard_port),
        "ray-client-server-port": str(settings.client_port),
        "dashboard-agent-listen-port": str(settings.agent_port),
    }


def _worker_group(
    spec: RLJobSpec, profile: HardwareProfile, settings: RenderSettings, group: NodeGroup, template: Manifest
) -> dict[str, Json]:
    size, devices = worker_size(spec, profile, group), group.devices
    least, most = derived.node_bounds(spec, group)
    # The group's field and not rayStartParams, which KubeRay refuses beside it: it needs no quoting for a shell, and
    # says NPU whether or not this KubeRay knows Ascend. Each device reserves its threads, one at least.
    threads = spec.resources.threads_per_device or 1
    resources = {"CPU": str(max(to_cores(size.cpu), devices * threads))}
    if profile.ray_resource is not None:
        resources[profile.ray_resource] = str(devices)
    return {
        "groupName": group.name,
        "replicas": group.nodes,
        "minReplicas": least,
        "maxReplicas": most,
        "resources": resources,
        "rayStartParams": {
            "object-store-memory": size.object_store_bytes(),
            **ray_ports(spec, settings, group).start_parameters(),
        },
        "template": template,
    }
