"""The init containers of a worker pod: one makes the cache of operators writable, one examines the pod."""

from __future__ import annotations

from rljob_api.derived import NodeGroup
from rljob_api.profiles import HardwareProfile
from rljob_api.roles import COMPUTE_VARIABLE
from rljob_api.spec import QueueSystem, RLJobSpec
from rljob_api.wanted import DOCTOR, WANTED_VARIABLE, Wanted
from rljob_operator.kubernetes_objects import Manifest, block_of, blocks_of
from rljob_operator.render.cann import cann_environment
from rljob_operator.render.variables import COMPILE_CACHE

_STATUS = "/dev/termination-log"
_COMMAND = f'exec rljob doctor --wanted "${WANTED_VARIABLE}" --termination-message {_STATUS}'


def cache_containers(profile: HardwareProfile, ray: Manifest) -> list[Manifest]:
    """Containers that give the pod's group the node's folder of compiled operators; none where it is not the node's.

    The kubelet makes that folder as root's, and pods run as an ordinary user. Nobody else may write there: operators of
    others would run in the job.

    Args:
        profile: the job's hardware.
        ray: the Ray container, with its mounts.
    """
    tuning = profile.tuning
    if not tuning.compile_cache or tuning.compile_cache_path is None or profile.device_group is None:
        return []
    return [
        {
            "name": "rljob-operator-cache",
            "image": ray["image"],
            "imagePullPolicy": ray["imagePullPolicy"],
            "command": ["/bin/sh", "-c"],
            "args": [f"chgrp {profile.device_group} {COMPILE_CACHE} && chmod 2770 {COMPILE_CACHE}"],
            "resources": _without(block_of(ray, "resources"), profile.resource_name),
            "securityContext": {
                "runAsUser": 0,
                "runAsNonRoot": False,
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]},
            },
            "volumeMounts": [m for m in blocks_of(ray, "volumeMounts") if m["mountPath"] == COMPILE_CACHE],
        }
    ]


def init_containers(spec: RLJobSpec, profile: HardwareProfile, group: NodeGroup, ray: Manifest) -> list[Manifest]:
    """The doctor, or nothing.

    It is a copy of the Ray container that looks instead of working: same image, environment, mounts and size, which
    costs nothing, since a pod asks for the larger of its init containers and its containers. A trainer's own variables
    are in what is wanted: the doctor starts a process with them. Preloaded into its own shell, the memory saver would
    end it before CANN is on the library path.

    Args:
        spec: the job.
        profile: its hardware.
        group: whose pods they are of.
        ray: the Ray container, with its mounts.
    """
    on_cpu = not profile.has_devices or COMPUTE_VARIABLE in spec.environment.variables
    if spec.pods.doctor == "Skip" or on_cpu:
        return []
    wanted = Wanted.of(spec, group)
    container = {key: value for key, value in ray.items() if not key.endswith("Probe")}
    if not _gets_devices(spec, profile):
        container["resources"] = _without(block_of(ray, "resources"), profile.resource_name)
        wanted = (
            wanted
            if spec.scheduling.system is QueueSystem.MIND_CLUSTER
            else wanted.model_copy(update={"devices": None})
        )
    environment = f"{cann_environment()}; " if profile.needs_cann else ""
    return [
        container
        | {
            "name": DOCTOR,
            "command": ["/bin/bash", "-c", "--"],
            "args": [environment + _COMMAND],
            "env": [
                *blocks_of(ray, "env"),
                {
                    "name": WANTED_VARIABLE,
                    "value": _literal(wanted.model_dump_json(by_alias=True, exclude_defaults=True)),
                },
            ],
            # A process that dies before it can write its problems leaves its last lines.
            "terminationMessagePath": _STATUS,
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
    ]


def _gets_devices(spec: RLJobSpec, profile: HardwareProfile) -> bool:
    """Whether the init container may ask for the pod's devices; the kubelet then hands the same ones on.

    MindCluster's device plugin counts ordinary containers alone (ascend-device-plugin, getNPUResourceNumOfPod); there
    the annotation's variable brings the devices.
    """
    return profile.init_containers_share_devices and spec.scheduling.system is not QueueSystem.MIND_CLUSTER


def _without(resources: Manifest, name: str | None) -> Manifest:
    return {kind: {key: v for key, v in block_of(resources, kind).items() if key != name} for kind in resources}


def _literal(text: str) -> str:
    """Text that Kubernetes, which replaces `$(NAME)`, leaves as it is."""
    return text.replace("$(", "$$(")
