"""Checks of `weightSync.transport: InPlace`: engines copy from memory of their host that stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rljob_api import derived
from rljob_api.profiles import PROFILES
from rljob_api.rules.findings import Check, Finding
from rljob_api.spec import Precision, RLJobSpec, TrainingBackend, WeightTransport


def _in_place(spec: Any) -> Iterator[Finding]:
    if spec.weight_sync.transport == WeightTransport.IN_PLACE:
        for wrong, allowed in _obstacles(spec):
            yield Finding(("weightSync", "transport"), f"InPlace: {wrong}", f"Auto, or {allowed}")


def _obstacles(spec: Any) -> Iterator[tuple[str, str]]:
    """(wrong, allowed) of each."""
    training, devices = spec.training, PROFILES[spec.resources.profile].has_devices
    if derived.has_nodes_apart(spec):
        yield "engines are on other nodes than trainers", "both on one machine"
    elif devices and derived.divides_devices(spec):
        yield "an engine cannot open another device's memory", "mode Colocated"
    elif derived.nodes_of_a_model(spec) > 1:
        yield "a copy of the trained model lies on several nodes", "a layout within a node"
    elif devices and not _has_its_own(spec):
        yield (
            "a device's engine opens its trainer's memory alone, which has not all that it takes",
            "training.tensorParallel as rollout.tensorParallel, with pipelineParallel, expertParallel and"
            " fsdp.shardSize 1",
        )
    if training.lora is not None:
        yield "adapters are put together to be handed over", "no training.lora"
    elif training.backend == TrainingBackend.FSDP and training.precision == Precision.BF16:
        yield "backend FSDP keeps fp32, which engines take as bf16", "training.precision fp32, or backend Megatron"


def _has_its_own(spec: Any) -> bool:
    """Whether each device's trainer holds whatever the engine on it takes."""
    training = spec.training
    if training.backend == TrainingBackend.FSDP and derived.trainers(spec) > 1:
        return spec.rollout.tensor_parallel == 1 and training.fsdp is not None and training.fsdp.shard_size == 1
    alike = training.tensor_parallel == spec.rollout.tensor_parallel
    return bool(alike and training.pipeline_parallel == training.expert_parallel == 1)


HANDOVER_CHECKS: dict[type, tuple[Check, ...]] = {RLJobSpec: (_in_place,)}
