"""Environment variables of the pods: profile, tuning and HCCL, then the user's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Literal

from rljob_api import roles
from rljob_api.json_types import Json
from rljob_api.profiles import PROFILES, HardwareProfile
from rljob_api.spec import RLJobSpec
from rljob_api.tuning import shared_cores, tuning_variables
from rljob_api.wire.names import ATTEMPT_VARIABLE, DRIVER_TOKEN_VARIABLE, MANIFEST_VARIABLE
from rljob_operator.render.errors import RenderError
from rljob_operator.render.hccl import hccl_environment
from rljob_operator.render.names import check_name, check_variables
from rljob_operator.render.settings import short

Env = list[dict[str, Json]]

COMPILE_CACHE = "/var/cache/rljob/operators"
"""Where compiled operators are kept in the pod."""

_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray makes its workers nice: beside anything else on the node they would get a fraction of it.
    "RAY_worker_niceness": "0",
    # Ray waits 30 to 60 seconds for its own processes, the job API among them; on a busy node, or with a cold image,
    # that would cost an attempt.
    "RAY_agent_register_timeout_ms": "120000",
    # Not longer: a raylet whose agent takes 15 seconds to start dies, a number in Ray's code, and is waited for all the
    # same, until the container ends and is started again.
    "RAY_raylet_start_wait_time_s": "60",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "120",
    "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "120",
    # Each line of output at once: the last words of a process that dies are what explains it.
    "PYTHONUNBUFFERED": "1",
}
_RAY_WORKER = {
    # An actor that is killed must not leave the engine's own child processes on the device. Not on the head: it makes
    # Ray's processes ignore SIGCHLD, and then a driver that failed is reported as succeeded with exit code 0.
    "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "true",
}
_LEAVE_SECONDS = 15
_RESTRICTED = {
    # The user has no entry in the image's list of users, hence no home and no name, which torch's caches ask for.
    "HOME": "/tmp",
    "USER": "rljob",
}
_OWNED = {
    "ASCEND_RT_VISIBLE_DEVICES": "Ray gives each process its devices",
    "ASCEND_VISIBLE_DEVICES": "the device plugin gives each pod its devices (spec.resources.overrides has the "
    "annotation of MindCluster's scheduler)",
    "RAY_ADDRESS": "KubeRay sets it",
    "RAY_AUTH_MODE": "spec.network.rayAuthentication decides",
    "RAY_AUTH_TOKEN": "spec.network.rayAuthentication decides",
    "RAY_REDIS_ADDRESS": "a restart goes on from a checkpoint, Ray's own fault tolerance is not used",
    "REDIS_USERNAME": "a restart goes on from a checkpoint, Ray's own fault tolerance is not used",
    DRIVER_TOKEN_VARIABLE: "the operator makes the token",
    ATTEMPT_VARIABLE: "the operator counts the attempts",
    MANIFEST_VARIABLE: "the operator hands over the manifest in it",
    "HCCL_IF_BASE_PORT": "trainer and engine on one device would bind the same ports; take spec.hccl.trainerPorts "
    "and rolloutPorts",
    "HCCL_HOST_SOCKET_PORT_RANGE": "take spec.hccl.trainerPorts.host and rolloutPorts.host",
    "HCCL_NPU_SOCKET_PORT_RANGE": "take spec.hccl.trainerPorts.device and rolloutPorts.device",
    "HCCL_IF_IP": "take spec.hccl.useHostIp",
    "HCCL_SOCKET_IFNAME": "take spec.hccl.interface",
}
"""Variables that no user sets -> why, or what to set instead."""
_OWNED_POD_WIDE = {
    "HCCL_CONNECT_TIMEOUT": "take spec.hccl.connectTimeoutSeconds",
    "HCCL_EXEC_TIMEOUT": "take spec.hccl.execTimeoutSeconds",
    "HCCL_DETERMINISTIC": "take spec.hccl.deterministic",
    "HCCL_BUFFSIZE": "take spec.hccl.bufferSizeMb; one role's own value goes to spec.environment.trainer or rollout",
    "HCCL_OP_EXPANSION_MODE": "take spec.hccl.opExpansionMode; one role's own value goes to spec.environment.trainer "
    "or rollout",
    "LD_PRELOAD": "take spec.memorySaver, and for engines spec.environment.rollout",
}
_ALLOCATORS = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def pod_environment(spec: RLJobSpec, profile: HardwareProfile, *, head: bool) -> Env:
    """`env` of the Ray container of the head or of a worker."""
    env = _list(_RAY)
    if profile.restricted:
        env += _list(_RESTRICTED)
    env += _list(tuning_variables(profile.tuning, COMPILE_CACHE))
    if profile.uses_hccl:
        env += hccl_environment(spec, head=head)
    if head:
        # Ray would end a stopped driver after 3 s; it has graceSeconds to save in, and some more to leave.
        env += _list({"RAY_JOB_STOP_WAIT_TIME_S": str(math.ceil(spec.checkpoint.grace_seconds) + _LEAVE_SECONDS)})
        env += _list(profile.head_environment)
    else:
        env += _list(_RAY_WORKER)
        if profile.visible_devices_variable is not None and profile.visible_devices_annotation is not None:
            path = f"metadata.annotations['{profile.visible_devices_annotation}']"
            env.append({"name": profile.visible_devices_variable, "valueFrom": {"fieldRef": {"fieldPath": path}}})
    return _over(_over(env, spec.resources.overrides.environment), spec.environment.variables)


def secret_environment(spec: RLJobSpec) -> list[dict[str, Json]]:
    """`envFrom` of the Ray container."""
    return [{"secretRef": {"name": name}} for name in spec.environment.secrets]


def role_environment(spec: RLJobSpec, role: Literal["trainer", "rollout"]) -> dict[str, str]:
    """Variables that one role's processes have beyond their pod's, as the driver hands them to Ray.

    The worker adds a few of its own (threads, Python path), which do not depend on the hardware.
    """
    own = roles.trainer_variables(spec) if role == "trainer" else roles.engine_variables(spec)
    return own | spec.environment.variables | getattr(spec.environment, role)


def check_environment(spec: RLJobSpec) -> None:
    """Refuse variables that would undo what colocation needs, each with the field that is meant for it."""
    for i, name in enumerate(spec.environment.secrets):
        check_name(f"spec.environment.secrets[{i}]", name)
    for field, values, pod_wide in (
        ("spec.resources.overrides.environment", spec.resources.overrides.environment, True),
        ("spec.environment.variables", spec.environment.variables, True),
        ("spec.environment.trainer", spec.environment.trainer, False),
        ("spec.environment.rollout", spec.environment.rollout, False),
    ):
        check_variables(field, values)
        for name in values:
            instead = _OWNED.get(name) or (_OWNED_POD_WIDE.get(name) if pod_wide else None)
            if instead is not None:
                raise RenderError(field, f"{name} is not the user's: {instead}")
        allocator = PROFILES[spec.resources.profile].allocator_variable
        if allocator is not None:
            _check_allocator(field, values, allocator)


def check_tuning(spec: RLJobSpec) -> None:
    """Refuse what would bind all processes of a node to the same cores."""
    if wrong := shared_cores(spec):
        chosen = spec.resources.tuning.cpu_affinity or ""
        raise RenderError("spec.resources.tuning.cpuAffinity", f"{short(chosen)}: {wrong}")


def _check_allocator(field: str, values: Mapping[str, str], right: str) -> None:
    for name in _ALLOCATORS:
        value = values.get(name)
        if value is None:
            continue
        if name != right:
            raise RenderError(field, f"{name} is not for this profile, some versions refuse two of them; take {right}")
        if not re.search(r"expandable_segments\s*:\s*False\b", value, re.IGNORECASE):
            raise RenderError(
                field,
                f"{name} is {short(value)}: sleeping needs expandable_segments:False on both sides, in so many words",
            )


def _list(values: Mapping[str, str]) -> Env:
    return [{"name": name, "value": value} for name, value in values.items()]


def _over(env: Env, values: Mapping[str, str]) -> Env:
    return [*(entry for entry in env if entry["name"] not in values), *_list(values)]
