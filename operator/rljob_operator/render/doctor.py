"""The init container that examines a worker pod before Ray starts in it."""

from __future__ import annotations

from typing import Any

from rljob_api.doctor import DOCTOR, WANTED_VARIABLE, Wanted
from rljob_api.roles import COMPUTE_VARIABLE
from rljob_api.spec import Profile, QueueSystem, RLJobSpec
from rljob_operator.render.cann import cann_environment
from rljob_operator.render.profiles import HardwareProfile

_STATUS = "/dev/termination-log"
_COMMAND = f'exec rljob doctor --wanted "${WANTED_VARIABLE}" --termination-message {_STATUS}'


def init_containers(spec: RLJobSpec, profile: HardwareProfile, ray: dict[str, Any]) -> list[dict[str, Any]]:
    """The doctor, or nothing.

    It is a copy of the Ray container that looks instead of working: same image, environment, mounts and size, which
    costs nothing, since a pod asks for the larger of its init containers and its containers. A trainer's own variables
    are in what is wanted: the doctor starts a process with them. Preloaded into its own shell, the memory saver would
    end it before CANN is on the library path.

    Args:
        spec: the job.
        profile: its hardware.
        ray: the Ray container, with its mounts.
    """
    on_cpu = profile.kind == "cpu" or COMPUTE_VARIABLE in spec.environment.variables
    if spec.pods.doctor == "Skip" or on_cpu:
        return []
    wanted = Wanted.of(spec)
    container = {key: value for key, value in ray.items() if not key.endswith("Probe")}
    if not _gets_devices(spec):
        container["resources"] = _without(ray["resources"], profile.resource_name)
        wanted = (
            wanted
            if spec.scheduling.system is QueueSystem.MIND_CLUSTER
            else wanted.model_copy(update={"devices": None})
        )
    environment = f"{cann_environment()}; " if profile.kind == "npu" else ""
    return [
        container
        | {
            "name": DOCTOR,
            "command": ["/bin/bash", "-c", "--"],
            "args": [environment + _COMMAND],
            "env": [
                *ray["env"],
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


def _gets_devices(spec: RLJobSpec) -> bool:
    """Whether the init container may ask for the pod's devices; the kubelet then hands the same ones on.

    MindCluster's device plugin counts ordinary containers alone (ascend-device-plugin, getNPUResourceNumOfPod); there
    the annotation's variable brings the devices. HAMi would give the init container devices of its own.
    """
    return spec.scheduling.system is not QueueSystem.MIND_CLUSTER and spec.resources.profile is not Profile.HAMI


def _without(resources: dict[str, Any], name: str | None) -> dict[str, Any]:
    return {kind: {key: v for key, v in amounts.items() if key != name} for kind, amounts in resources.items()}


def _literal(text: str) -> str:
    """Text that Kubernetes, which replaces `$(NAME)`, leaves as it is."""
    return text.replace("$(", "$$(")
