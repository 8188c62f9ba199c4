"""Rules about what each training backend can do."""

from __future__ import annotations

from typing import Any

from rljob_api import derived
from rljob_api.rules.core import Rule
from rljob_api.rules.infrastructure import trainer_devices
from rljob_api.spec import (
    LoraHandover,
    LoraSpec,
    Mode,
    Recompute,
    RLJobSpec,
    TrainingBackend,
    TrainingSpec,
)

_RANKS = (8, 16, 32, 64, 128, 256, 512)
"""Ranks of vLLM 0.23's memory for adapters (vllm/config/lora.py, MaxLoRARanks); others leave a part unused."""
_ROWS = "FSDP divides parameters row by row, and gathers each layer whole"


def _uncut(field: str, attribute: str) -> Rule:
    """A size by which Megatron cuts a layer or a stack of them."""
    return Rule(
        on=TrainingSpec,
        field=field,
        wrong=_ROWS,
        allowed=f"1 with backend FSDP, whose fsdp.shardSize says what is divided; with backend Megatron any {field}",
        check=lambda training: training.backend != TrainingBackend.FSDP or getattr(training, attribute) == 1,
        cel=f"self.backend != 'FSDP' || self.{field} == 1",
    )


def _shards_fit(spec: Any) -> bool:
    return spec.training.fsdp is None or derived.trainers(spec) % (spec.training.fsdp.shard_size or 1) == 0


_NOT_GIVEN, _DEVICES = trainer_devices()

BACKENDS = (
    Rule(
        on=TrainingSpec,
        field="fsdp",
        wrong="backend Megatron does not read it",
        allowed="only with backend FSDP",
        check=lambda training: training.fsdp is None or training.backend == TrainingBackend.FSDP,
        cel="!has(self.fsdp) || self.backend == 'FSDP'",
    ),
    Rule(
        on=TrainingSpec,
        field="lora",
        wrong="backend Megatron trains all parameters",
        allowed="only with backend FSDP",
        check=lambda training: training.lora is None or training.backend == TrainingBackend.FSDP,
        cel="!has(self.lora) || self.backend == 'FSDP'",
    ),
    Rule(
        on=LoraSpec,
        field="rank",
        wrong="engines have memory for adapters of other ranks",
        allowed=f"{', '.join(map(str, _RANKS[:-1]))} or {_RANKS[-1]} with handover Adapters; any rank with Merged",
        check=lambda lora: lora.handover != LoraHandover.ADAPTERS or lora.rank in _RANKS,
        cel=f"self.handover != 'Adapters' || self.rank in {list(_RANKS)}",
    ),
    Rule(
        on=RLJobSpec,
        field="training.lora.handover",
        wrong="engines that sleep while others train forget adapters",
        allowed="Merged, or mode Disaggregated or Async",
        check=lambda spec: (
            spec.training.lora is None
            or spec.training.lora.handover != LoraHandover.ADAPTERS
            or spec.mode != Mode.COLOCATED
        ),
        cel="self.mode != 'Colocated' || !has(self.training) || !has(self.training.lora)"
        " || self.training.lora.handover != 'Adapters'",
    ),
    _uncut("tensorParallel", "tensor_parallel"),
    _uncut("pipelineParallel", "pipeline_parallel"),
    _uncut("expertParallel", "expert_parallel"),
    Rule(
        on=TrainingSpec,
        field="recompute",
        wrong="FSDP computes whole layers again or none",
        allowed="None or Full with backend FSDP",
        check=lambda training: training.backend != TrainingBackend.FSDP or training.recompute != Recompute.SELECTIVE,
        cel="self.backend != 'FSDP' || self.recompute != 'Selective'",
    ),
    Rule(
        on=RLJobSpec,
        field="training.fsdp.shardSize",
        wrong="the trainers cannot be divided into copies of the model",
        allowed="a divisor of nodes x devicesPerNode of resources (with mode Disaggregated or Async: of"
        " resources.trainer)",
        check=_shards_fit,
        cel=f"{_NOT_GIVEN} || !has(self.training) || !has(self.training.fsdp) || !has(self.training.fsdp.shardSize)"
        f" || ({_DEVICES}) % self.training.fsdp.shardSize == 0",
    ),
    Rule(
        on=RLJobSpec,
        field="rollout.routerReplay",
        wrong="backend FSDP routes tokens as transformers does, and cannot be told other experts",
        allowed="false, or training.backend Megatron",
        check=lambda spec: spec.training.backend != TrainingBackend.FSDP or not spec.rollout.router_replay,
        cel="!has(self.training) || self.training.backend != 'FSDP' || !self.rollout.routerReplay",
    ),
)
