"""Variables that Ascend users tune by hand: a profile's, with `resources.tuning` over them.

In pods the operator sets them for all processes; without Kubernetes the driver does, for trainers and engines.
"""

from __future__ import annotations

from dataclasses import replace

from rljob_api import derived
from rljob_api.profiles import PROFILES, Tuning
from rljob_api.spec import MemorySaverMode, RLJobSpec

_LOG_LEVELS = {"DEBUG": ("0", "DEBUG"), "INFO": ("1", "INFO"), "WARNING": ("2", "WARN"), "ERROR": ("3", "ERROR")}
"""Level -> ASCEND_GLOBAL_LOG_LEVEL (a number), ASDOPS_LOG_LEVEL and ATB_LOG_LEVEL (a word)."""


def resolved_tuning(spec: RLJobSpec) -> Tuning:
    """The profile's tuning with `resources.tuning` over it."""
    profile = PROFILES[spec.resources.profile]
    tuning = profile.tuning
    if spec.memory_saver.mode is MemorySaverMode.TORCH and tuning.task_queue_enable == 2:
        # The torch hook sees the calling thread alone, not the one that level 2 allocates workspaces on.
        tuning = replace(tuning, task_queue_enable=1)
    given = spec.resources.tuning
    return replace(tuning, **{name: value for name in profile.tunable if (value := getattr(given, name)) is not None})


def tuning_variables(tuning: Tuning, compile_cache: str) -> dict[str, str]:
    """The tuning as variables.

    Args:
        tuning: what was resolved.
        compile_cache: folder for compiled operators.
    """
    number, word = _LOG_LEVELS.get(tuning.log_level or "", (None, None))
    values = {
        "OMP_NUM_THREADS": _number(tuning.omp_num_threads),
        "TASK_QUEUE_ENABLE": _number(tuning.task_queue_enable),
        "CPU_AFFINITY_CONF": tuning.cpu_affinity,
        "MULTI_STREAM_MEMORY_REUSE": _number(tuning.multi_stream_memory_reuse),
        "COMBINED_ENABLE": _number(tuning.combined_enable),
        "ASCEND_GLOBAL_LOG_LEVEL": number,
        "ASDOPS_LOG_LEVEL": word,
        "ATB_LOG_LEVEL": word,
    }
    if tuning.compile_cache:
        values |= {
            "ACL_OP_COMPILER_CACHE_MODE": "enable",
            "ACL_OP_COMPILER_CACHE_DIR": compile_cache,
            "ASCEND_MAX_OP_CACHE_SIZE": _number(tuning.compile_cache_mib),
        }
    return {name: value for name, value in values.items() if value is not None}


def capture_variables(spec: RLJobSpec) -> dict[str, str]:
    """Variables of engine processes that capture graphs: torch_npu captures none with a task queue of level 2
    (NPUGraph.cpp:155)."""
    capture = spec.rollout.graph_mode and resolved_tuning(spec).task_queue_enable == 2
    return {"TASK_QUEUE_ENABLE": "1"} if capture else {}


def shares_cores(spec: RLJobSpec) -> bool:
    """Whether several processes of a node would be bound to the same cores: each sees its device as npu0."""
    bound = "cpu_affinity" in PROFILES[spec.resources.profile].tunable
    return bound and spec.resources.tuning.cpu_affinity not in (None, "0") and derived.devices_per_node(spec) > 1


def _number(value: int | None) -> str | None:
    return None if value is None else str(int(value))
