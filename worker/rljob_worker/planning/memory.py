"""The memory of every phase of the loop: one table for each kind of rank, one for a node's host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rljob_api import derived
from rljob_api.hardware import device_memory
from rljob_api.profiles import PROFILES
from rljob_api.quantities import to_number
from rljob_api.spec import MemorySaverMode, Precision, RLJobSpec
from rljob_worker.algorithms import get_algorithm
from rljob_worker.models.config import ModelConfig
from rljob_worker.models.manifest import hf_manifest
from rljob_worker.planning.activations import PassBytes, forward_pass, training_pass
from rljob_worker.planning.communicators import communicator_bytes, engine_groups, trainer_groups
from rljob_worker.planning.engine import EngineMemory, engine_memory
from rljob_worker.planning.job_shape import JobShape, MicroBatch, job_shape, largest_micro_batch
from rljob_worker.planning.parameters import TrainingState, rank_parameters, training_state
from rljob_worker.weightsync.plan import HOST_SLICE_BYTES, largest_module, slot_bytes
from rljob_worker.weightsync.transport import SLOT_COUNT

GIB = 2**30
Bytes = dict[str, int]
"""Component -> bytes."""

RUNTIME_BYTES = {"npu": GIB, "cuda": GIB // 2, "cpu": 0}
"""Of each process on a device: context, streams, operator binaries. Assumed; CANN's reference says 100 to 200 MB for
the AI CPU operators alone."""
PROCESS_BYTES = {"npu": 4 * GIB, "cuda": 3 * GIB, "cpu": GIB}
"""Host memory of each process before it holds any tensor: seen on cpu, assumed elsewhere."""
RAY_BYTES = GIB
"""Host memory of Ray's own processes on a node; assumed."""
KEPT_FREE = "kept free"
"""Component of what must stay free: memorySaver.trainMemoryMargin, checked before the trainer wakes."""


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """What lies in one memory at the peak of a phase."""

    phase: str
    components: Bytes

    @property
    def total(self) -> int:
        """Bytes of all components."""
        return sum(self.components.values())


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """One memory over all phases."""

    title: str
    limit: int | None
    """Bytes there are; None where it is not known."""
    phases: list[PhaseMemory]

    @property
    def peak(self) -> PhaseMemory:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def over(self) -> int:
        """Bytes that are missing at the peak; 0 where it fits or nothing limits it."""
        return 0 if self.limit is None else max(0, self.peak.total - self.limit)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a job will need."""

    job: JobShape
    engine: EngineMemory
    batch: MicroBatch
    devices: list[MemoryTable]
    """One for each kind of rank: a pipeline stage, with the engine rank on the same device."""
    host: MemoryTable
    """Of the fullest node."""
    device_source: str

    @property
    def tables(self) -> list[MemoryTable]:
        """All of them."""
        return [*self.devices, self.host]

    @property
    def engine_short(self) -> int:
        """Bytes that the KV cache lacks for one sequence of the longest length."""
        return max(0, self.engine.kv_needed - self.engine.kv_cache)

    @property
    def missing(self) -> int:
        """Bytes that are missing in all: 0 when the job fits."""
        return sum(table.over for table in self.tables) + self.engine_short

    @property
    def fits(self) -> bool:
        """Whether everything has room."""
        return self.missing == 0


@dataclass(frozen=True, slots=True)
class _Rank:
    """The parts of one device's memory."""

    state: TrainingState
    training: PassBytes
    forward: PassBytes


def plan_memory(
    spec: RLJobSpec, model: ModelConfig, *, device_bytes: int | None = None, node_bytes: int | None = None
) -> MemoryPlan:
    """Plan a job's memory.

    Args:
        spec: the job.
        model: its model.
        device_bytes: memory of a device; default: the profile's, None where that says nothing.
        node_bytes: host memory of a worker pod; default: the job's or the profile's.

    Raises:
        UserError: sizes that do not fit the model or the devices.
    """
    job = job_shape(spec, model)
    known = device_memory(spec)
    source = "--device-memory" if device_bytes else "not known"
    if device_bytes is None and known is not None:
        device_bytes, source = known.nbytes, known.source
    batch = largest_micro_batch(spec, model, job)
    planner = _Planner(spec, model, job, batch, device_bytes)
    ranks = {stage: planner.rank(stage) for stage in range(job.trainers.pp)}
    devices = [
        MemoryTable(_rank_title(job, stage), device_bytes, planner.device_phases(ranks[stage])) for stage in _kinds(job)
    ]
    default_node = PROFILES[spec.resources.profile].memory_per_device_gib * job.per_node * GIB
    given = spec.resources.worker.memory
    limit = node_bytes or (to_number(given) if given else default_node)
    nodes = [planner.host_phases([ranks[s] for s in job.stages_of_node(n)]) for n in range(spec.resources.nodes)]
    fullest = max(nodes, key=lambda phases: max(phase.total for phase in phases))
    title = f"host memory of a worker pod (trainers: {job.per_node}, engines: {derived.engines_per_node(spec)})"
    return MemoryPlan(job, planner.engine, batch, devices, MemoryTable(title, limit, fullest), source)


def _kinds(job: JobShape) -> list[int]:
    """Stages that differ: the first, one between, the last."""
    return sorted({0, min(1, job.trainers.pp - 1), job.trainers.pp - 1})


def _rank_title(job: JobShape, stage: int) -> str:
    what = "device" if job.kind != "cpu" else "tensors of a rank, part of the host memory"
    if job.trainers.pp == 1:
        return f"{what}: every rank ({job.trainers.world_size})"
    middle = f"2 to {job.trainers.pp - 1}" if job.trainers.pp > 3 else "2"
    name = {0: "1", job.trainers.pp - 1: str(job.trainers.pp)}.get(stage, middle)
    return f"{what}: ranks of pipeline stage {name} of {job.trainers.pp}"


class _Planner:
    """Puts the parts together, phase by phase."""

    def __init__(
        self, spec: RLJobSpec, model: ModelConfig, job: JobShape, batch: MicroBatch, device_bytes: int | None
    ) -> None:
        self._spec, self._model, self._job, self._batch = spec, model, job, batch
        self._cpu = job.kind == "cpu"
        self._saver = spec.memory_saver.mode is not MemorySaverMode.OFF
        manifest = hf_manifest(model)
        engine_communicators = communicator_bytes(spec, job, engine_groups(model, job))
        runtime = RUNTIME_BYTES[job.kind]
        dtype = _dtype(spec.training.precision)
        self.slots = SLOT_COUNT * slot_bytes(
            manifest,
            dtype=dtype,
            bucket_bytes=spec.weight_sync.bucket_bytes,
            slice_bytes=HOST_SLICE_BYTES if self._cpu else None,
        )
        self.engine = engine_memory(
            spec, model, job, device_bytes, engine_communicators + runtime, largest_module(manifest)
        )
        self._always = {
            "staging slots": 0 if self._cpu else self.slots,
            "communicators": engine_communicators + communicator_bytes(spec, job, trainer_groups(model, job)),
            "runtime": 2 * runtime,
        }
        algorithm = get_algorithm(spec.algorithm.name)
        self._updates = derived.updates_per_step(spec)
        self._reference = algorithm.needs_reference(spec.algorithm)
        self._old = algorithm.needs_old_log_probs(self._updates)

    def rank(self, stage: int) -> _Rank:
        """The parts of a rank of one stage."""
        spec, model, job = self._spec, self._model, self._job
        parameters = rank_parameters(model, job, stage)
        return _Rank(
            training_state(parameters, job, spec.training.precision),
            training_pass(spec, model, job, stage, self._batch, parameters.largest),
            forward_pass(spec, model, job, stage, self._batch),
        )

    # --- a device ----------------------------------------------------------------------------

    def device_phases(self, rank: _Rank) -> list[PhaseMemory]:
        """Peaks of one device, in the order of the loop (`driver.loops.colocated`)."""
        awake = self._awake(rank)
        # What stays when the trainer sleeps, and when the engine does: vLLM cannot sleep on cpu.
        asleep = {} if self._saver else awake
        weights = {"engine weights": self.engine.weights}
        resting = weights if self._cpu else {}
        generating = weights | {"KV cache": self.engine.kv_cache, "engine work": self.engine.work}
        landing = weights | {"engine work": self.engine.landing}
        margin = {KEPT_FREE: to_number(self._spec.memory_saver.train_memory_margin) if self._saver else 0}
        parts: list[tuple[str, Bytes]] = [
            ("rollout", asleep | generating),
            ("reward", asleep | generating),
            ("rollout_sleep", asleep | generating),
            ("wake_up", awake | resting | margin),
        ]
        forward = awake | resting | _pass_parts(rank.forward)
        parts += [("ref_log_probs", forward)] * self._reference + [("log_probs", forward)] * self._old
        parts += [
            ("actor_train", max(self._updating(rank), key=_total) | resting),
            ("checkpoint", awake | resting),
            ("rollout_wake_weights", awake | weights),
            ("update_weights", awake | landing),
            ("sleep", awake | weights),
            ("rollout_wake_kv", asleep | weights | {"KV cache": self.engine.kv_cache}),
        ]
        parts += [("eval", asleep | generating)] * (self._spec.evaluation is not None)
        return [PhaseMemory(phase, _used(components | self._always)) for phase, components in parts]

    def _updating(self, rank: _Rank) -> list[Bytes]:
        """The peaks of training: gradients are computed, exchanged, and, where the optimizer's state comes, applied."""
        awake = self._awake(rank)
        peaks = [awake | _pass_parts(rank.training)]
        if self._cpu:
            # Gloo copies the buffer that it reduces, and the C heap still has the activations' pages.
            kept = {"activations": rank.training.activations}
            peaks.append(awake | kept | {"work": rank.state.exchanged})
        if self._spec.training.optimizer.host_offload and not self._cpu:
            peaks.append(awake | {"optimizer": rank.state.optimizer})
        return peaks

    def _awake(self, rank: _Rank) -> dict[str, int]:
        offloaded = self._spec.training.optimizer.host_offload
        return {
            "weights": rank.state.weights,
            "gradients": rank.state.gradients,
            "optimizer": 0 if offloaded else rank.state.optimizer,
        }

    # --- a node ------------------------------------------------------------------------------

    def host_phases(self, ranks: list[_Rank]) -> list[PhaseMemory]:
        """Peaks of a node's host memory; on cpu the devices' tables are part of it."""
        engines = derived.engines_per_node(self._spec)
        processes = len(ranks) + engines * (1 if self._job.engine_tp == 1 else 1 + self._job.engine_tp)
        fixed = {
            "processes": processes * PROCESS_BYTES[self._job.kind] + RAY_BYTES,
            "staging slots": self.slots if self._cpu else 0,
            "backup": 0 if self._cpu else sum(self._backup(rank) for rank in ranks),
            "optimizer": sum(self._offloaded(rank) for rank in ranks),
            "reference": sum(2 * rank.state.weights * self._reference for rank in ranks),
            "snapshot": sum((rank.state.weights + rank.state.optimizer) * (self._updates > 1) for rank in ranks),
        }
        tables = [self.device_phases(rank) for rank in ranks]
        phases = []
        for rows in zip(*tables, strict=True):
            tensors = sum(_tensors(row) for row in rows) if self._cpu else 0
            kept_free = max(row.components.get(KEPT_FREE, 0) for row in rows) if self._cpu else 0
            backup = sum(rank.state.weights + rank.state.optimizer for rank in ranks) if self._cpu else 0
            asleep = self._saver and "weights" not in rows[0].components
            moved = {"backup": backup - fixed["optimizer"]} if self._cpu and asleep else {}
            components = fixed | moved | {"tensors": tensors, KEPT_FREE: kept_free}
            phases.append(PhaseMemory(rows[0].phase, _used(components)))
        return phases

    def _backup(self, rank: _Rank) -> int:
        """Pinned host memory of the saver on devices: all that it pauses, kept while awake too.

        torch_memory_saver's NPU build backs up every segment with TMS_INIT_ENABLE_CPU_BACKUP and keeps the pinned
        memory after resuming (sgl-kernel-npu, contrib/torch_memory_saver/csrc/core.cpp).
        """
        return sum(self._awake(rank).values()) if self._saver else 0

    def _offloaded(self, rank: _Rank) -> int:
        return rank.state.optimizer if self._spec.training.optimizer.host_offload else 0


def _dtype(precision: Precision) -> torch.dtype:
    return torch.bfloat16 if precision is Precision.BF16 else torch.float32


def _pass_parts(peak: PassBytes) -> dict[str, int]:
    return {"activations": peak.activations, "logits": peak.logits, "work": peak.work}


def _total(components: Bytes) -> int:
    return sum(components.values())


def _used(components: Bytes) -> dict[str, int]:
    return {name: nbytes for name, nbytes in components.items() if nbytes}


def _tensors(row: PhaseMemory) -> int:
    return sum(nbytes for name, nbytes in row.components.items() if name != KEPT_FREE)
