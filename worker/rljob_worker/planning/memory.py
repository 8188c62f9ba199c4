"""The memory of every phase of the loop: one table for each kind of rank, one for a node's host memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from rljob_api import derived
from rljob_api.derived import NodeGroup
from rljob_api.profiles import PROFILES
from rljob_api.quantities import to_number
from rljob_api.spec import MemorySaverMode, Precision, RLJobSpec
from rljob_worker.algorithms import get_algorithm
from rljob_worker.models.config import ModelConfig
from rljob_worker.models.trained import TrainedModel, checkpoint_tensors
from rljob_worker.models.transformers_model import TransformersModel, adapter_tensors
from rljob_worker.planning.activations import PassBytes, forward_pass, training_pass
from rljob_worker.planning.communicators import communicator_bytes, engine_groups, trainer_groups
from rljob_worker.planning.critic import critic_of
from rljob_worker.planning.engine import engine_memory
from rljob_worker.planning.fsdp import fsdp_forward_pass, fsdp_state, fsdp_training_pass
from rljob_worker.planning.job_shape import JobShape, MicroBatch, itemsize
from rljob_worker.planning.judge import judge_memory
from rljob_worker.planning.parameters import TrainingState, rank_parameters, training_state
from rljob_worker.planning.tables import GIB, KEPT_FREE, Bytes, MemoryTable, PhaseMemory, used
from rljob_worker.planning.teacher import kept_bytes, taught_bytes, teacher_of
from rljob_worker.weightsync.plan import HOST_SLICE_BYTES, largest_module, slot_bytes
from rljob_worker.weightsync.slots import SLOT_COUNT

RUNTIME_BYTES = {"npu": GIB, "cuda": GIB // 2, "cpu": 0}
"""Bytes of each process on a device: context, streams, operator binaries. Assumed; CANN's reference says 100 to 200
MB for the AI CPU operators alone."""
PROCESS_BYTES = {"npu": 4 * GIB, "cuda": 3 * GIB, "cpu": GIB}
"""Host memory of each process before it holds any tensor: seen on cpu, assumed elsewhere."""
RAY_BYTES = GIB
"""Host memory of Ray's own processes on a node; assumed."""


@dataclass(frozen=True, slots=True)
class Rank:
    """The parts of a trainer's memory on its device."""

    state: TrainingState
    training: PassBytes
    forward: PassBytes
    critic: Rank | None = None
    """The critic's, where there is one."""
    teacher: Rank | None = None
    """The teacher's, where there is one: its weights and its forward pass count."""

    @property
    def models(self) -> list[Rank]:
        """The policy's parts and the critic's."""
        return [self] if self.critic is None else [self, self.critic]


def handed_over(spec: RLJobSpec, model: TrainedModel) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of what engines get in each step."""
    lora = derived.adapters_apart(spec)
    if lora is None:
        return list(checkpoint_tensors(model).trained)
    assert isinstance(model, TransformersModel), "rules: adapters are FSDP's"
    return [*adapter_tensors(model, lora)]


class Planner:
    """Puts the parts together, phase by phase."""

    def __init__(
        self, spec: RLJobSpec, model: TrainedModel, job: JobShape, batch: MicroBatch, device_bytes: int | None
    ) -> None:
        self._spec, self._model, self._job, self._batch = spec, model, job, batch
        self._device_bytes = device_bytes
        self._engines_per_node = derived.engines_per_node(spec)
        self._cpu = job.kind == "cpu"
        self._saver = spec.memory_saver.mode is not MemorySaverMode.OFF
        manifest = handed_over(spec, model)
        size = itemsize(spec)
        self.handed_over = sum(math.prod(shape) for _, shape in manifest) * size
        self.of_model = sum(math.prod(shape) for _, shape in checkpoint_tensors(model).trained) * size
        engine_communicators = communicator_bytes(spec, job, engine_groups(model, job))
        runtime = RUNTIME_BYTES[job.kind]
        dtype = _dtype(spec.training.precision)
        self._in_place = not derived.has_slots(spec)
        self.slots = 0
        if not self._in_place:
            self.slots = SLOT_COUNT * slot_bytes(
                manifest,
                dtype=dtype,
                bucket_bytes=spec.weight_sync.bucket_bytes,
                slice_bytes=HOST_SLICE_BYTES if self._cpu else None,
            )
        self.engine = engine_memory(
            spec,
            model,
            job,
            device_bytes,
            engine_communicators + runtime,
            largest_module(manifest),
            adapter_elements=0 if derived.adapters_apart(spec) is None else self.handed_over // size,
        )
        self._judge = judge_memory(spec, device_bytes, self.engine.weights * job.engine_tp)
        slots = 0 if self._cpu else self.slots
        trainer_communicators = communicator_bytes(spec, job, trainer_groups(model, job))
        self._with_trainer = {"staging slots": slots, "communicators": trainer_communicators, "runtime": runtime}
        self._with_engine = {"staging slots": slots, "communicators": engine_communicators, "runtime": runtime}
        graphs = {"graphs": self.engine.graphs}
        # The slots of a device that both share are the trainer's, and the engine opens them.
        self._always = {name: nbytes + self._with_engine[name] for name, nbytes in self._with_trainer.items()}
        self._always |= {"staging slots": slots} | graphs
        self._with_engine |= graphs
        self._of_judge = {"runtime": runtime}
        if self._judge is not None:
            self._of_judge |= {"judge": self._judge.weights, "judge cache": self._judge.cache}
        if self._judge is not None and not self._judge.own_devices:
            self._always["runtime"] += runtime
            if self._cpu:
                self._always["judge"] = self._judge.weights
        algorithm = get_algorithm(spec.algorithm.name)
        self._updates = derived.updates_per_step(spec)
        self._reference = algorithm.needs_reference(spec.algorithm)
        # With the adapters off, a model is its own reference.
        self._kept_reference = self._reference and spec.training.lora is None
        self._old = algorithm.needs_old_log_probs(self._updates)

    def rank(self, stage: int) -> Rank:
        """The parts of a rank of one stage."""
        spec, model = self._spec, self._model
        taught = teacher_of(spec, model)
        teacher = None if taught is None else self._parts(*taught, stage)
        beside = critic_of(spec, model)
        critic = None if beside is None else self._parts(*beside, stage)
        return replace(self._parts(spec, model, stage), critic=critic, teacher=teacher)

    def with_sequence(self, length: int) -> Self:
        """The planner of the same job whose largest micro-batch is one sequence, all of it responses."""
        other = copy(self)
        other._batch = replace(self._batch, tokens=length, responses=length, longest=length)
        return other

    def _parts(self, spec: RLJobSpec, model: TrainedModel, stage: int) -> Rank:
        """One model's."""
        job, batch = self._job, self._batch
        if isinstance(model, TransformersModel):
            return Rank(
                fsdp_state(spec, model, job),
                fsdp_training_pass(spec, model, job, batch),
                fsdp_forward_pass(spec, model, job, batch),
            )
        parameters = rank_parameters(model, job, stage)
        return Rank(
            training_state(parameters, job, spec.training.precision),
            training_pass(spec, model, job, stage, batch, parameters.largest),
            forward_pass(spec, model, job, stage, batch),
        )

    def _teacher_weights(self, rank: Rank) -> int:
        """Bytes of the teacher's weights on a rank: in the format of computation, which FSDP keeps nothing else in."""
        if rank.teacher is None:
            return 0
        weights = rank.teacher.state.weights
        return weights if isinstance(self._model, ModelConfig) else weights // 4 * itemsize(self._spec)

    def device_tables(self) -> list[MemoryTable]:
        """One for each kind of rank, and of a judge's own devices."""
        ranks = [
            MemoryTable(rank_title(self._job, stage), self._device_bytes, self.device_phases(self.rank(stage)))
            for stage in stages_that_differ(self._job)
        ]
        if self._judge is None or not self._judge.own_devices:
            return ranks
        what = "tensors of a process, part of the host memory" if self._cpu else "device"
        title = f"judge, {what}: each of its own ({self._spec.resources.nodes * self._judge.own_devices})"
        return [*ranks, MemoryTable(title, self._device_bytes, [PhaseMemory("judge", used(self._of_judge))])]

    def host_tables(self, node_bytes: int | None) -> list[MemoryTable]:
        """One for each group of nodes: the fullest of its nodes. Of so many bytes, or what the job or profile says."""
        job, nodes = self._job, range(self._spec.resources.nodes)
        every = [self.host_phases([self.rank(stage) for stage in job.stages_of_node(node)]) for node in nodes]
        (group,) = derived.node_groups(self._spec)
        title = f"host memory of a worker pod (trainers: {job.per_node}, engines: {self._engines_per_node})"
        return [self.host_table(group, title, node_bytes, every)]

    def host_table(
        self, group: NodeGroup, title: str, node_bytes: int | None, every: Sequence[list[PhaseMemory]]
    ) -> MemoryTable:
        """The table of the fullest of a group's nodes."""
        fullest = max(every, key=lambda phases: max(phase.total for phase in phases))
        usual = PROFILES[self._spec.resources.profile].memory_per_device_gib * group.devices * GIB
        given = group.worker.memory
        limit = node_bytes or (to_number(given) if given else usual)
        return MemoryTable(title, limit, fullest, f"{group.worker_field}.memory")

    # --- a device ----------------------------------------------------------------------------

    def device_phases(self, rank: Rank) -> list[PhaseMemory]:
        """Peaks of one device, in the order of the loop (`driver.loops.colocated`)."""
        awake = self._awake(rank)
        # What stays when the trainer sleeps, and when the engine does: vLLM cannot sleep on cpu.
        asleep = awake if not self._saver else {"shared weights": rank.state.weights} if self._in_place else {}
        weights = {"engine weights": self.engine.weights}
        resting = weights if self._cpu else {}
        generating = weights | {"KV cache": self.engine.kv_cache, "engine work": self.engine.work}
        landing = weights | {"engine work": self.engine.landing}
        margin = {KEPT_FREE: to_number(self._spec.memory_saver.train_memory_margin) if self._saver else 0}
        parts: list[tuple[str, Bytes]] = [
            ("rollout", asleep | generating),
            ("reward", asleep | generating),
            ("rollout_sleep", asleep | generating),
            *self._judging(asleep | resting),
            ("wake_up", awake | resting | margin),
        ]
        parts += [(phase, components | resting) for phase, components in self._learning(rank)]
        parts += [
            ("checkpoint", awake | resting),
            ("rollout_wake_weights", awake | weights),
            ("update_weights", awake | landing | {"merged": rank.state.merging}),
            ("sleep", awake | weights),
            ("rollout_wake_kv", asleep | weights | {"KV cache": self.engine.kv_cache}),
        ]
        parts += [("eval", asleep | generating)] * (self._spec.evaluation is not None)
        return [PhaseMemory(phase, used(components | self._always)) for phase, components in parts]

    def _judging(self, beside: Bytes) -> list[tuple[str, Bytes]]:
        """Peaks of a judge's turn, beside what is there while trainer and engine sleep."""
        if self._judge is None or self._judge.own_devices:
            return []
        judge = {"judge": self._judge.weights, "judge cache": self._judge.cache}
        return [(phase, beside | judge) for phase in ("judge_wake", "judge", "judge_sleep")]

    def _learning(self, rank: Rank) -> list[tuple[str, Bytes]]:
        """Peaks of the phases of `driver.learn`, without what is there beside the trainer's."""
        awake = self._awake(rank)
        forward = awake | _pass_parts(rank.forward)
        parts: list[tuple[str, Bytes]] = []
        if rank.critic is not None:
            parts.append(("values", awake | _pass_parts(rank.critic.forward)))
        parts += [("ref_log_probs", forward)] * self._reference
        if rank.teacher is not None:
            beside = {"teacher": self._teacher_weights(rank)}
            parts.append(("teacher_log_probs", awake | beside | _pass_parts(rank.teacher.forward)))
            awake = awake | {"teacher": taught_bytes(self._spec, self._batch)}
        parts += [("log_probs", forward)] * self._old
        if rank.critic is not None:
            parts.append(("critic_train", max(self._updating(awake, rank.critic), key=_total)))
        return [*parts, ("actor_train", max(self._updating(awake, rank), key=_total))]

    def _updating(self, awake: Bytes, rank: Rank) -> list[Bytes]:
        """The peaks of training: gradients are computed, exchanged, and, where the optimizer's state comes, applied."""
        peaks = [awake | _pass_parts(rank.training)]
        if self._cpu:
            # Gloo copies the buffer that it reduces, and the C heap still has the activations' pages.
            kept = {"activations": rank.training.activations}
            peaks.append(awake | kept | {"work": rank.state.exchanged})
        if self._spec.training.optimizer.host_offload and not self._cpu:
            peaks.append(awake | {"optimizer": rank.state.on_device})
        return peaks

    def _awake(self, rank: Rank) -> dict[str, int]:
        offloaded = self._spec.training.optimizer.host_offload
        return {
            "weights": rank.state.weights,
            "gradients": rank.state.gradients,
            "optimizer": 0 if offloaded else rank.state.optimizer,
            "critic": 0 if rank.critic is None else _resident(rank.critic.state, offloaded),
        }

    # --- a node ------------------------------------------------------------------------------

    def host_phases(self, ranks: list[Rank]) -> list[PhaseMemory]:
        """Peaks of a node's host memory; on cpu the devices' tables are part of it."""
        fixed = {
            "processes": self._processes(len(ranks), self._engines_per_node),
            "judge": self._judge_on_host(len(ranks)),
            "staging slots": self.slots if self._cpu else 0,
            "backup": 0 if self._cpu else sum(self._backup(rank) for rank in ranks),
            **self._kept(ranks),
        }
        tables = [self.device_phases(rank) for rank in ranks]
        phases = []
        for rows in zip(*tables, strict=True):
            tensors = sum(_tensors(row) for row in rows) if self._cpu else 0
            kept_free = max(row.components.get(KEPT_FREE, 0) for row in rows) if self._cpu else 0
            states = [model.state for rank in ranks for model in rank.models]
            backup = sum(state.weights + state.optimizer for state in states) if self._cpu else 0
            backup -= sum(rank.state.weights for rank in ranks) if self._cpu and self._in_place else 0
            asleep = self._saver and "weights" not in rows[0].components
            moved = {"backup": backup - fixed["optimizer"]} if self._cpu and asleep else {}
            components = fixed | moved | {"tensors": tensors, KEPT_FREE: kept_free}
            phases.append(PhaseMemory(rows[0].phase, used(components)))
        return phases

    def _kept(self, ranks: Sequence[Rank]) -> Bytes:
        """Memory that trainers keep on the host, whatever the phase."""
        return {
            "optimizer": sum(self._offloaded(rank) for rank in ranks),
            "reference": sum(2 * rank.state.weights * self._kept_reference for rank in ranks),
            "teacher": sum(
                self._teacher_weights(rank) + kept_bytes(self._spec, self._job) for rank in ranks if rank.teacher
            ),
            "snapshot": sum(self._copied(rank) for rank in ranks),
            "routed experts": self._routed_experts() if ranks else 0,
        }

    def _copied(self, rank: Rank) -> int:
        """Bytes of the state before a step, which one of several updates, or with a critic, may go back to."""
        states = [rank.state] * (self._updates > 1) + ([] if rank.critic is None else [rank.critic.state])
        return sum(state.trained + state.optimizer for state in states)

    def _routed_experts(self) -> int:
        """Bytes of the experts of a step's tokens, for router replay: in Ray's store once on each node with a
        trainer, if all is long."""
        if not self._spec.rollout.router_replay:
            return 0
        model = self._model
        assert isinstance(model, ModelConfig)  # no other backend replays
        each = np.min_scalar_type(model.num_experts - 1).itemsize
        of_token = sum(model.moe_layers) * model.experts_per_token * each
        return derived.samples_per_step(self._spec) * self._batch.longest * of_token

    def _processes(self, trainers: int, engines: int) -> int:
        """Bytes of a node's processes before they hold any tensor, Ray's among them."""
        processes = trainers + engines * (1 if self._job.engine_tp == 1 else 1 + self._job.engine_tp)
        judges = 0 if self._judge is None else self._judge.own_devices or trainers
        return (processes + judges) * PROCESS_BYTES[self._job.kind] + RAY_BYTES

    def _judge_on_host(self, ranks: int) -> int:
        """Bytes of the judge in a node's host memory, beside tensors of devices that are shared: each of its processes
        keeps the weights while it sleeps, and on cpu one with a device of its own has all there."""
        if self._judge is None:
            return 0
        if self._judge.own_devices:
            return self._judge.own_devices * sum(self._of_judge.values()) if self._cpu else 0
        return 0 if self._cpu else ranks * self._judge.weights

    def _backup(self, rank: Rank) -> int:
        """Pinned host memory of the saver on devices: all that it pauses, kept while awake too.

        torch_memory_saver's NPU build backs up every segment with TMS_INIT_ENABLE_CPU_BACKUP and keeps the pinned
        memory after resuming (sgl-kernel-npu, contrib/torch_memory_saver/csrc/core.cpp).
        """
        if not self._saver:
            return 0
        return sum(self._awake(rank).values()) - (rank.state.weights if self._in_place else 0)

    def _offloaded(self, rank: Rank) -> int:
        offloads = self._spec.training.optimizer.host_offload
        return sum(model.state.optimizer for model in rank.models) if offloads else 0


def _resident(state: TrainingState, offloaded: bool) -> int:
    """Bytes of an awake rank's part of a model between micro-batches."""
    return state.weights + state.gradients + (0 if offloaded else state.optimizer)


def _dtype(precision: Precision) -> torch.dtype:
    return torch.bfloat16 if precision is Precision.BF16 else torch.float32


def _pass_parts(peak: PassBytes) -> dict[str, int]:
    parts = {"activations": peak.activations, "logits": peak.logits, "work": peak.work, "gathered": peak.gathered}
    return parts | ({"gradients": peak.gradients} if peak.gradients else {})


def _total(components: Bytes) -> int:
    return sum(components.values())


def _tensors(row: PhaseMemory) -> int:
    return sum(nbytes for name, nbytes in row.components.items() if name != KEPT_FREE)


def stages_that_differ(job: JobShape) -> list[int]:
    """Pipeline stages of different memory: the first, one between, the last."""
    return sorted({0, min(1, job.trainers.pp - 1), job.trainers.pp - 1})


def rank_title(job: JobShape, stage: int) -> str:
    """Title that names the ranks of a table."""
    what = "device" if job.kind != "cpu" else "tensors of a rank, part of the host memory"
    if job.trainers.pp == 1:
        return f"{what}: every rank ({job.trainers.world_size})"
    middle = f"2 to {job.trainers.pp - 1}" if job.trainers.pp > 3 else "2"
    name = {0: "1", job.trainers.pp - 1: str(job.trainers.pp)}.get(stage, middle)
    return f"{what}: ranks of pipeline stage {name} of {job.trainers.pp}"
