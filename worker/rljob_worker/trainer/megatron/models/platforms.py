"""Differences in Megatron between kinds of devices; code elsewhere never asks for the kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rljob_worker.trainer.megatron.models import megatron_npu, seeding
from rljob_worker.trainer.megatron.models.kernels import CausalAttention, CpuCausalAttention, SwiGLU


@dataclass(frozen=True, slots=True)
class Platform:
    """Megatron on one kind of device."""

    seed: Callable[[int], None]
    """Call with the job's seed after `initialize_model_parallel`."""
    attention: type[CausalAttention]
    """Core attention of every layer."""
    activation: type[torch.nn.Module]
    """Gated activation of every MLP."""
    keep_pipeline_outputs: bool = False
    """Whether a stage keeps its output after sending it; Megatron's way to free them is not for the CPU."""


_PLATFORMS = {
    "cpu": Platform(
        seeding.seed_cpu,
        CpuCausalAttention,
        SwiGLU,
        keep_pipeline_outputs=True,
    ),
    "cuda": Platform(seeding.seed_device, CausalAttention, SwiGLU),
    "npu": Platform(seeding.seed_npu, megatron_npu.FusionAttention, megatron_npu.FusedSwiGLU),
}


def megatron_platform(kind: str) -> Platform:
    """Megatron on devices of `kind` (`Device.name`); ValueError for another one."""
    try:
        return _PLATFORMS[kind]
    except KeyError:
        raise ValueError(f"device {kind!r} is none of {', '.join(_PLATFORMS)}") from None
