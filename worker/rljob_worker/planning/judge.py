"""A judge's part of memory: its model is on the devices while trainers and engines sleep, or on some of its own."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api import RLJobSpec, derived
from rljob_worker.engine.platforms import CPU_KV_CACHE_BYTES
from rljob_worker.models.judge_model import JudgeFacts
from rljob_worker.models.places import folder_here, judge_path
from rljob_worker.planning.job_shape import itemsize


@dataclass(frozen=True, slots=True)
class JudgeMemory:
    """Bytes on one device while the judge is awake."""

    weights: int
    cache: int
    """Room that vLLM takes for its largest step and its cache."""
    own_devices: int = 0
    """Devices of each node that it has to itself; 0: it is awake by turns on those of the others."""


def judge_memory(spec: RLJobSpec, device_bytes: int | None, policy: int) -> JudgeMemory | None:
    """Memory of the judge whose model the job runs; None where there is none.

    vLLM keeps to `memoryFraction` of the device, weights among it, or takes `kvCacheBytes` beside them.

    Args:
        spec: the job.
        device_bytes: memory of a device; None on cpu.
        policy: bytes of the policy's weights, for a checkpoint that is not here.

    Raises:
        UserError: the folder is there and holds no model that scores.
    """
    judge = derived.judge_model(spec)
    if judge is None or judge.model is None:
        return None
    place = judge_path(spec, judge)
    folder, weights = folder_here(judge.model.path, place), policy
    if folder is not None:
        weights = JudgeFacts.of(folder, judge.model, judge.kind, place).parameters * itemsize(spec)
    cache = judge.model.kv_cache_bytes
    if cache is None and device_bytes is None:
        cache = CPU_KV_CACHE_BYTES
    if cache is None:
        assert device_bytes is not None
        cache = max(0, int(judge.model.memory_fraction * device_bytes) - weights)
    return JudgeMemory(weights, cache, derived.judge_devices_per_node(spec))
