"""Proposals when a job does not fit: changes that were tried by planning again, most harmless first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rljob_api import RLJob, derived
from rljob_api.spec import MemorySaverMode, Recompute, RLJobSpec
from rljob_api.validation import ManifestError, load_manifest
from rljob_worker.errors import UserError
from rljob_worker.planning.tables import GIB, MemoryPlan

_SMALLEST_BUCKET_BYTES = 64 * 2**20
_SMALLEST_HCCL_MIB = 64
_SMALLEST_BATCHED_TOKENS = 2048
_FRACTION_STEP = 0.05
_LARGEST_FRACTION = 0.9
_SHORTEST_RESPONSE = 1024

Replan = Callable[[RLJobSpec], MemoryPlan]


@dataclass(frozen=True, slots=True)
class Change:
    """One field, and what it costs to change it."""

    field: str
    value: str
    cost: str

    @property
    def setting(self) -> str:
        """The change as `--set` takes it."""
        return f"spec.{self.field}={self.value}"


@dataclass(frozen=True, slots=True)
class Remedies:
    """Changes after which the job fits."""

    alone: list[Change]
    """Each is enough by itself."""
    together: list[Change]
    """These are enough together; empty where one is enough."""
    missing: int
    """Bytes that are missing after all that was tried; 0 when something helps."""


def find_remedies(job: RLJob, plan: MemoryPlan, replan: Replan) -> Remedies:
    """Try changes one by one, then one after the other until the job fits."""
    kinds = _kinds(job.spec, plan)
    alone = [change for kind in kinds if (change := _first_that_fits(job, kind, replan)) is not None]
    if alone:
        return Remedies(alone, [], 0)
    chosen: list[Change] = []
    missing = plan.missing
    for kind in kinds:
        for change in kind:
            others = [other for other in chosen if other.field != change.field]
            after = _missing(job, [*others, change], replan)
            if after is not None and after < missing:
                chosen, missing = [*others, change], after
            if not missing:
                return Remedies([], _needed(job, chosen, replan), 0)
    return Remedies([], [], missing)


def larger_cache(spec: RLJobSpec, plan: MemoryPlan) -> Change | None:
    """A larger `memoryFraction` where generation would use it: the trainer sleeps meanwhile."""
    device = plan.devices[-1]
    wanted = plan.engine.kv_wanted - plan.engine.kv_cache
    if device.limit is None or spec.rollout.kv_cache_bytes is not None or wanted <= 0:
        return None
    generating = max(row.total for table in plan.devices for row in table.phases if "KV cache" in row.components)
    more = min(device.limit - generating, wanted) / device.limit
    fraction = math.floor((spec.rollout.memory_fraction + more) / _FRACTION_STEP) * _FRACTION_STEP
    if fraction < spec.rollout.memory_fraction + _FRACTION_STEP / 2:
        return None
    return Change("rollout.memoryFraction", f"{min(fraction, _LARGEST_FRACTION):.2f}", "more sequences at once")


def _first_that_fits(job: RLJob, kind: list[Change], replan: Replan) -> Change | None:
    return next((change for change in kind if _missing(job, [change], replan) == 0), None)


def _needed(job: RLJob, chosen: list[Change], replan: Replan) -> list[Change]:
    """Without those that later ones made unnecessary; the least harmless are dropped first."""
    for change in reversed(list(chosen)):
        fewer = [other for other in chosen if other is not change]
        if _missing(job, fewer, replan) == 0:
            chosen = fewer
    return chosen


def _missing(job: RLJob, changes: list[Change], replan: Replan) -> int | None:
    """Bytes that are missing after changes; None where they are not allowed."""
    document = job.model_dump(mode="json", by_alias=True)
    try:
        return replan(load_manifest(document, overrides=[change.setting for change in changes]).spec).missing
    except (ManifestError, UserError):
        return None


def _kinds(spec: RLJobSpec, plan: MemoryPlan) -> list[list[Change]]:
    """Changes by field, in the order of how little harm they do; each field's in growing steps."""
    training, rollout = spec.training, spec.rollout
    kinds = [
        _numbers(
            "training.maxTokensPerMicroBatch",
            _halved(training.max_tokens_per_micro_batch, plan.batch.longest),
            "the same result, in more and smaller micro-batches",
        ),
        _numbers(
            "weightSync.bucketBytes",
            _halved(spec.weight_sync.bucket_bytes, _SMALLEST_BUCKET_BYTES),
            "a slower weight hand-over",
        ),
        [Change("weightSync.transport", "Auto", "a slower weight hand-over, through staging slots")]
        * (not derived.has_slots(spec)),
        _host_memory(plan),
        [Change("memorySaver.mode", "preload", "the trainer sleeps; seconds a step to switch")]
        * (spec.memory_saver.mode is MemorySaverMode.OFF),
        _numbers(
            "rollout.maxBatchedTokens",
            _halved(rollout.max_batched_tokens or 8192, _SMALLEST_BATCHED_TOKENS),
            "slower prefill",
        ),
        _cache(spec, plan),
        [Change("training.recompute", "Selective", "MLPs are computed twice in training")]
        * (training.recompute is Recompute.NONE),
        [Change("training.recompute", "Full", "every layer is computed twice: about a third more training time")]
        * (training.recompute is not Recompute.FULL),
        [Change("training.fsdp.reshardAfterForward", "true", "each layer is gathered twice in training")]
        * (training.fsdp is not None and not training.fsdp.reshard_after_forward),
        [Change("training.fsdp.shardSize", "null", "gathers over all trainers, slower between nodes")]
        * (training.fsdp is not None and training.fsdp.shard_size is not None),
        [Change("training.optimizer.hostOffload", "true", "optimizer updates over the host's memory: slower")]
        * (not training.optimizer.host_offload),
        _parallel("rollout.tensorParallel", rollout.tensor_parallel, plan, "fewer engines, each on more devices"),
        _parallel("training.tensorParallel", training.tensor_parallel, plan, "communication in every layer"),
        _parallel("training.contextParallel", training.context_parallel, plan, "two exchanges in every layer"),
        _parallel("training.expertParallel", training.expert_parallel, plan, "experts' tokens go to other ranks"),
        _parallel("training.pipelineParallel", training.pipeline_parallel, plan, "stages wait for one another"),
        _numbers(
            "rollout.maxResponseTokens",
            _halved(rollout.max_response_tokens, _SHORTEST_RESPONSE),
            "longer responses are cut: another task",
        ),
    ]
    if spec.episodes is not None:
        shorter = _halved(spec.episodes.max_tokens, _SHORTEST_RESPONSE)
        kinds.append(_numbers("episodes.maxTokens", shorter, "longer episodes end early: another task"))
    if plan.job.kind == "npu":
        smaller = _halved(spec.hccl.buffer_size_mb or 200, _SMALLEST_HCCL_MIB)
        kinds.insert(2, _numbers("hccl.bufferSizeMb", smaller, "slower large collectives"))
    return [kind for kind in kinds if kind]


def _host_memory(plan: MemoryPlan) -> list[Change]:
    return [
        Change(table.setting, f"{math.ceil(table.peak.total / GIB)}Gi", "the nodes must have it")
        for table in plan.hosts
        if table.over
    ]


def _cache(spec: RLJobSpec, plan: MemoryPlan) -> list[Change]:
    """Smaller or, where the engine's cache cannot hold one sequence, larger."""
    cost = "fewer sequences at once: slower generation"
    grow = plan.engine_short > 0
    if spec.rollout.kv_cache_bytes is not None or plan.job.kind == "cpu":
        needed = plan.engine.kv_needed
        sizes = [needed] if grow else _halved(plan.engine.kv_cache, needed)
        return _numbers("rollout.kvCacheBytes", sizes, "more memory for the engine" if grow else cost)
    step = _FRACTION_STEP if grow else -_FRACTION_STEP
    fractions = []
    fraction = spec.rollout.memory_fraction + step
    while _FRACTION_STEP < fraction <= _LARGEST_FRACTION:
        fractions.append(Change("rollout.memoryFraction", f"{fraction:.2f}", "room for the cache" if grow else cost))
        fraction += step
    return fractions


def _parallel(field: str, size: int, plan: MemoryPlan, cost: str) -> list[Change]:
    return _numbers(field, [size * factor for factor in (2, 4, 8) if size * factor <= plan.job.per_node], cost)


def _numbers(field: str, values: list[int], cost: str) -> list[Change]:
    return [Change(field, str(value), cost) for value in values]


def _halved(value: int, least: int) -> list[int]:
    values = []
    while value // 2 > least:
        value //= 2
        values.append(value)
    return [*values, least] if least < value else values
