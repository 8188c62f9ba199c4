"""The RayCluster of a job."""

from __future__ import annotations

import re
from typing import Any

from rljob_api import derived
from rljob_api.job import GROUP, KIND, VERSION
from rljob_api.quantities import to_cores
from rljob_api.spec import RLJobSpec
from rljob_operator.render.errors import RenderError
from rljob_operator.render.pods import JOB_LABEL, head_size, head_template, worker_size, worker_template
from rljob_operator.render.profiles import HardwareProfile, resolve
from rljob_operator.render.scheduling import cluster_annotations, cluster_labels
from rljob_operator.render.settings import RenderSettings, short
from rljob_operator.render.volumes import check_run_folder
from rljob_operator.state.observed import JobView

WORKER_GROUP = "workers"
_OLDEST_KUBERAY = (1, 5)


def secret_name(job: str) -> str:
    """Name of the Secret with the driver's bearer token."""
    return f"{job}-driver"


def valid_spec(job: JobView) -> RLJobSpec:
    """The job's spec, which must have passed validation."""
    if job.spec is None:
        raise RenderError("spec", job.problem or "does not pass validation")
    return job.spec


def metadata(job: JobView, name: str, component: str) -> dict[str, Any]:
    """Metadata of an object that belongs to a job and goes with it."""
    owner = {
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


def render_cluster(job: JobView, settings: RenderSettings) -> dict[str, Any]:
    """The RayCluster of a job: a head without devices and one worker pod a node.

    `spec.suspend` is left out: it is Kueue's.

    Raises:
        RenderError: for what Kubernetes, KubeRay or HCCL would not take.
    """
    spec = valid_spec(job)
    if settings.kuberay_version[:2] < _OLDEST_KUBERAY:
        found = ".".join(map(str, settings.kuberay_version))
        raise RenderError(
            "spec.resources", f"KubeRay {found} has no resources of worker groups; 1.5 or later is needed"
        )
    profile = resolve(spec)
    head = head_template(job.name, spec, profile, settings, secret_name(job.name))
    worker = worker_template(job.name, spec, profile, settings)
    check_run_folder(spec, head["spec"], worker["spec"])
    about = metadata(job, job.name, "cluster")
    about["labels"] |= cluster_labels(spec)
    annotations = cluster_annotations(spec, profile)
    if annotations:
        about["annotations"] = annotations
    cluster: dict[str, Any] = {
        "rayVersion": settings.ray_version,
        "headGroupSpec": {"rayStartParams": _head_start(spec, profile, settings), "template": head},
        "workerGroupSpecs": [_worker_group(spec, profile, settings, worker)],
    }
    if uses_token(spec, settings):
        cluster["authOptions"] = {"mode": "token"}
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": about, "spec": cluster}


def uses_token(spec: RLJobSpec, settings: RenderSettings) -> bool:
    """Whether Ray's API asks for the token that KubeRay keeps in a Secret named like the cluster, key `auth_token`."""
    wanted = spec.network.ray_authentication
    if wanted == "Token" and not settings.token_authentication():
        found = ".".join(map(str, settings.kuberay_version))
        raise RenderError(
            "spec.network.rayAuthentication",
            f"Token needs KubeRay 1.5.1 and Ray 2.52 or later; here are {found} and {settings.ray_version}. "
            "Auto leaves it to the NetworkPolicy",
        )
    return wanted != "Off" and settings.token_authentication()


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
    spec: RLJobSpec, profile: HardwareProfile, settings: RenderSettings, template: dict[str, Any]
) -> dict[str, Any]:
    size = worker_size(spec, profile)
    devices = derived.devices_per_node(spec)
    # The group's field and not rayStartParams, which KubeRay refuses beside it: it needs no quoting for a shell, and
    # says NPU whether or not this KubeRay knows Ascend. Each device reserves its threads, one at least.
    threads = spec.resources.threads_per_device or 1
    resources = {"CPU": str(max(to_cores(size.cpu), devices * threads))}
    if profile.ray_resource is not None:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", profile.ray_resource):
            raise RenderError(
                "spec.resources.overrides.rayResource",
                f"{short(profile.ray_resource)} is no name of a Ray resource: letters, digits, '_', '-' and '.'",
            )
        resources[profile.ray_resource] = str(devices)
    nodes = spec.resources.nodes
    return {
        "groupName": WORKER_GROUP,
        "replicas": nodes,
        "minReplicas": nodes,
        "maxReplicas": nodes,
        "resources": resources,
        "rayStartParams": {
            "object-store-memory": size.object_store_bytes(),
            "dashboard-agent-listen-port": str(settings.agent_port),
        },
        "template": template,
    }
