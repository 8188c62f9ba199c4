"""Environment variables of the pods: profile, tuning and HCCL, then the user's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from rljob_api import roles
from rljob_api.json_types import Json
from rljob_api.profiles import HardwareProfile
from rljob_api.spec import RLJobSpec
from rljob_api.tuning import tuning_variables
from rljob_operator.render.hccl import hccl_environment

Env = list[dict[str, Json]]

COMPILE_CACHE = "/var/cache/rljob/operators"
"""Folder of compiled operators in the pod."""

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
    # Where it is on, Ray ends an actor's process group instead, and what left that group stays.
    "RAY_process_group_cleanup_enabled": "false",
}
_LEAVE_SECONDS = 15
_RESTRICTED = {
    # The user has no entry in the image's list of users, hence no home and no name, which torch's caches ask for.
    "HOME": "/tmp",
    "USER": "rljob",
}


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


def _list(values: Mapping[str, str]) -> Env:
    return [{"name": name, "value": value} for name, value in values.items()]


def _over(env: Env, values: Mapping[str, str]) -> Env:
    return [*(entry for entry in env if entry["name"] not in values), *_list(values)]
