"""Variables of processes: what they may hold, and those that no user sets: RLJob, Ray or a scheduler does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rljob_api import kubernetes_names as names
from rljob_api.base import ApiModel
from rljob_api.profiles import PROFILES
from rljob_api.rules.core import Rule
from rljob_api.rules.devices import on_one_of
from rljob_api.rules.findings import Check, Finding, labels, object_name, unprintable
from rljob_api.spec import EnvironmentSpec, MemorySaverMode, ProfileOverrides, RLJobSpec
from rljob_api.tuning import shares_cores
from rljob_api.wire.names import ATTEMPT_VARIABLE, DRIVER_TOKEN_VARIABLE, MANIFEST_VARIABLE, PRIVATE_VARIABLES

NEVER_GIVEN = ("PYTHONHOME", *PRIVATE_VARIABLES, ATTEMPT_VARIABLE)
"""To rewards, environments and functions of judges, whose code nobody checked."""
_FOLDERS = ("PATH", "HOME", "TMPDIR", "TMP", "TEMP", "RAY_TMPDIR")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
SAVER_VARIABLES = ("LD_PRELOAD", "TMS_HOOK_MODE", "TMS_INIT_ENABLE", "TMS_INIT_ENABLE_CPU_BACKUP")
_SAVER = "the memory saver owns it in trainers; take spec.memorySaver, and for engines spec.environment.rollout"
_PORTS = "trainer and engine on one device would bind the same ports; take spec.hccl.trainerPorts and rolloutPorts"
_NO_REDIS = "a restart goes on from a checkpoint, Ray's own fault tolerance is not used"
_ROLES = "one role's own value goes to spec.environment.trainer or rollout"
_TUNING = "take spec.resources.tuning"

OWNED = {
    "ASCEND_RT_VISIBLE_DEVICES": "Ray gives each process its devices",
    "ASCEND_VISIBLE_DEVICES": "the device plugin gives each pod its devices (spec.resources.overrides has the "
    "annotation of MindCluster's scheduler)",
    "RAY_ADDRESS": "KubeRay sets it, and rljob run has --address",
    "RAY_AUTH_MODE": "spec.network.rayAuthentication decides",
    "RAY_AUTH_TOKEN": "Ray's token is the job's own; spec.network.rayAuthentication decides",
    "RAY_AUTH_TOKEN_PATH": "Ray's token is the job's own; spec.network.rayAuthentication decides",
    "RAY_REDIS_ADDRESS": _NO_REDIS,
    "REDIS_USERNAME": _NO_REDIS,
    DRIVER_TOKEN_VARIABLE: "the operator makes the token",
    ATTEMPT_VARIABLE: "the operator counts the attempts",
    MANIFEST_VARIABLE: "the operator hands over the manifest in it",
    "PYTHONHOME": "another standard library would be loaded; spec.environment.pythonPath adds folders",
    "PYTHONPATH": "spec.environment.pythonPath adds folders, and the image has its own",
    **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
                    "the driver numbers the trainers, and they meet where it says"),
    "VLLM_CPU_KVCACHE_SPACE": "take spec.rollout.kvCacheBytes",
    "VLLM_CPU_OMP_THREADS_BIND": "take spec.resources.threadsPerDevice",
    "VLLM_WORKER_MULTIPROC_METHOD": "a forked process has no device",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "the engine's core runs in its actor",
    "HCCL_IF_BASE_PORT": _PORTS,
    "HCCL_HOST_SOCKET_PORT_RANGE": "take spec.hccl.trainerPorts.host and rolloutPorts.host",
    "HCCL_NPU_SOCKET_PORT_RANGE": "take spec.hccl.trainerPorts.device and rolloutPorts.device",
    "HCCL_IF_IP": "take spec.hccl.useHostIp",
    "HCCL_SOCKET_IFNAME": "take spec.hccl.interface",
}  # fmt: skip
"""Variables that no user sets -> why, or what to set instead."""
_OF_ALL_PROCESSES = {
    "HCCL_CONNECT_TIMEOUT": "take spec.hccl.connectTimeoutSeconds",
    "HCCL_EXEC_TIMEOUT": "take spec.hccl.execTimeoutSeconds",
    "HCCL_DETERMINISTIC": "take spec.hccl.deterministic",
    "HCCL_BUFFSIZE": f"take spec.hccl.bufferSizeMb; {_ROLES}",
    "HCCL_OP_EXPANSION_MODE": f"take spec.hccl.opExpansionMode; {_ROLES}",
    "TASK_QUEUE_ENABLE": f"{_TUNING}.taskQueueEnable; {_ROLES}",
    "CPU_AFFINITY_CONF": f"{_TUNING}.cpuAffinity",
    "MULTI_STREAM_MEMORY_REUSE": f"{_TUNING}.multiStreamMemoryReuse; {_ROLES}",
    "COMBINED_ENABLE": f"{_TUNING}.combinedEnable; {_ROLES}",
    "OMP_NUM_THREADS": f"{_TUNING}.ompNumThreads, or spec.resources.threadsPerDevice; {_ROLES}",
    "ACL_OP_COMPILER_CACHE_MODE": f"{_TUNING}.compileCache",
    "ACL_OP_COMPILER_CACHE_DIR": f"{_TUNING}.compileCachePath",
    "ASCEND_MAX_OP_CACHE_SIZE": f"{_TUNING}.compileCacheMib",
    "ASCEND_GLOBAL_LOG_LEVEL": f"{_TUNING}.logLevel; {_ROLES}",
    "ASDOPS_LOG_LEVEL": f"{_TUNING}.logLevel; {_ROLES}",
    "ATB_LOG_LEVEL": f"{_TUNING}.logLevel; {_ROLES}",
}
"""Variables that one role's processes may have another value of."""
_OF_ALL = {**OWNED, **dict.fromkeys(SAVER_VARIABLES, _SAVER), **_OF_ALL_PROCESSES}
_OF_TRAINERS = {**OWNED, **dict.fromkeys(SAVER_VARIABLES, _SAVER), "CPU_AFFINITY_CONF": f"{_TUNING}.cpuAffinity"}
_OF_ENGINES = {**OWNED, "CPU_AFFINITY_CONF": f"{_TUNING}.cpuAffinity"}
ALLOCATORS = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_NO_SEGMENTS = r"(?i)expandable_segments\s*:\s*False\b"
_PLACES = {
    "environment.variables": "has(self.environment)",
    "environment.trainer": "has(self.environment)",
    "environment.rollout": "has(self.environment)",
    "resources.overrides.environment": "has(self.resources) && has(self.resources.overrides)",
}
"""Fields of a spec that hold variables, and where their blocks are."""


def _listed(names: Any) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _owned_rule(on: type[ApiModel], field: str, owned: Mapping[str, str]) -> Rule:
    def exact(block: Any) -> Iterator[Finding]:
        for name in getattr(block, field):
            if name in owned:
                yield Finding((field, name), f"is not the user's: {owned[name]}", "leave it out")

    return Rule(
        on=on,
        field=field,
        wrong="a variable that RLJob, Ray or a scheduler sets, or that has a field of its own, is not the user's: "
        + ", ".join(owned),
        allowed="leave it out; spec.hccl, spec.network, spec.memorySaver and spec.resources say the same",
        check=lambda block: owned.keys().isdisjoint(getattr(block, field)),
        cel=f"!self.{field}.exists(name, name in [{_listed(owned)}])",
        exact=exact,
    )


def _values(spec: Any, place: str) -> Mapping[str, str]:
    block: Any = spec
    for part in place.split("."):
        block = getattr(block, part)
    return block


def _wrong_allocators(spec: Any, place: str) -> Iterator[Finding]:
    right = PROFILES[spec.resources.profile].allocator_variable
    path = tuple(place.split("."))
    for name, value in _values(spec, place).items() if right is not None else ():
        if name in ALLOCATORS and name != right:
            wrong = "is not for this profile, and some versions refuse two of them"
            yield Finding((*path, name), wrong, f"{right}")
        elif name == right and not re.search(_NO_SEGMENTS, value):
            wrong = "neither the memory saver nor vLLM's sleep mode, which engines have in every mode, works on others"
            yield Finding((*path, name), wrong, "expandable_segments:False in it, in so many words")


def _allocator_rule(place: str) -> Rule:
    at, cel = f"self.{place}", []
    for right in sorted({p.allocator_variable for p in PROFILES.values() if p.allocator_variable}):
        profiles = [name for name, profile in PROFILES.items() if profile.allocator_variable == right]
        others = " && ".join(f"!('{name}' in {at})" for name in ALLOCATORS if name != right)
        own = f"(!('{right}' in {at}) || {at}['{right}'].matches(r'{_NO_SEGMENTS}'))"
        cel.append(f"(!({on_one_of(profiles)}) || ({others} && {own}))")
    return Rule(
        on=RLJobSpec,
        field=place,
        wrong="neither the memory saver nor vLLM's sleep mode works with this setting of the allocator",
        allowed="the profile's own variable alone, with expandable_segments:False",
        check=lambda s: not any(_wrong_allocators(s, place)),
        cel=f"!({_PLACES[place]}) || ({' && '.join(cel)})",
        exact=lambda s: _wrong_allocators(s, place),
    )


_TUNABLE = [name for name, profile in PROFILES.items() if "cpu_affinity" in profile.tunable]
_AFFINITY = "has(self.resources) && has(self.resources.tuning) && has(self.resources.tuning.cpuAffinity)"
_TORCH = f"has(self.memorySaver) && self.memorySaver.mode == '{MemorySaverMode.TORCH}'"
_QUEUE = "has(self.resources) && has(self.resources.tuning) && has(self.resources.tuning.taskQueueEnable)"


def _unseen_thread(spec: Any) -> bool:
    return spec.memory_saver.mode == MemorySaverMode.TORCH


VARIABLES = (
    _owned_rule(EnvironmentSpec, "variables", _OF_ALL),
    _owned_rule(EnvironmentSpec, "trainer", _OF_TRAINERS),
    _owned_rule(EnvironmentSpec, "rollout", _OF_ENGINES),
    _owned_rule(ProfileOverrides, "environment", _OF_ALL),
    *(_allocator_rule(place) for place in _PLACES),
    Rule(
        on=RLJobSpec,
        field="resources.tuning.cpuAffinity",
        wrong="each process of a node sees its device as npu0, and all would be bound to the same cores",
        allowed="leave it out, or 0; another with one device on each node",
        check=lambda s: not shares_cores(s),
        cel=f"!({_AFFINITY}) || self.resources.tuning.cpuAffinity == '0' || !({on_one_of(_TUNABLE)})"
        " || self.mode != 'Colocated' || !has(self.resources.devicesPerNode) || self.resources.devicesPerNode == 1"
        " && !self.judges.exists(judge, has(judge.model) && has(judge.model.devicesPerNode))",
    ),
    Rule(
        on=RLJobSpec,
        field="resources.tuning.taskQueueEnable",
        wrong="the memory saver's torch hook does not see the thread on which level 2 allocates workspaces",
        allowed="0, 1, or left out, with memorySaver.mode torch",
        check=lambda s: not _unseen_thread(s) or s.resources.tuning.task_queue_enable != 2,
        cel=f"!({_TORCH}) || !({_QUEUE}) || self.resources.tuning.taskQueueEnable != 2",
    ),
    Rule(
        on=RLJobSpec,
        field="environment.trainer",
        wrong="TASK_QUEUE_ENABLE: the memory saver's torch hook does not see the thread on which level 2 allocates"
        " workspaces",
        allowed="0, 1, or left out, with memorySaver.mode torch",
        check=lambda s: not _unseen_thread(s) or s.environment.trainer.get("TASK_QUEUE_ENABLE") != "2",
        cel=f"!({_TORCH}) || !has(self.environment) || !('TASK_QUEUE_ENABLE' in self.environment.trainer)"
        " || self.environment.trainer['TASK_QUEUE_ENABLE'] != '2'",
    ),
)


def _environment(environment: Any) -> Iterator[Finding]:
    for field in ("variables", "trainer", "rollout"):
        yield from _variables((field,), getattr(environment, field))
    for i, path in enumerate(environment.python_path):
        if not path.strip() or unprintable(path) or ":" in path:
            yield Finding(("pythonPath", i), "is no folder: empty, or with ':' or control characters", "one path each")
    for i, name in enumerate(environment.secrets):
        yield from object_name(("secrets", i), name, "secret")


def _variables(at: tuple[str, ...], values: dict[str, str]) -> Iterator[Finding]:
    for name, value in values.items():
        if not names.is_variable(name):
            yield Finding((*at, name), "is no name of a variable", "letters, digits, '_', '-' and '.', no digit first")
        elif name in _THREADS and not re.fullmatch("[1-9][0-9]{0,3}", value):
            yield Finding((*at, name), "is no number of threads", "1 to 9999, in quotation marks")
        elif name in _FOLDERS and not any(part.startswith("/") for part in value.split(":")):
            yield Finding((*at, name), "names no folder, and processes need one", "an absolute path, or leave it out")
        elif "\0" in value:
            yield Finding((*at, name), "holds a NUL, which no variable can", "text without it")


def _overrides(overrides: Any) -> Iterator[Finding]:
    yield from _variables(("environment",), overrides.environment)
    yield from labels(("nodeSelector",), overrides.node_selector)


VARIABLE_CHECKS: dict[type, tuple[Check, ...]] = {EnvironmentSpec: (_environment,), ProfileOverrides: (_overrides,)}
