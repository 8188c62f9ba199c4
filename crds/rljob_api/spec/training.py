"""`spec.training`: what trains, and its optimizer."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.base import (
    ApiModel,
    Fraction,
    GroupSize,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TokenCount,
)


class TrainingBackend(StrEnum):
    """Training libraries."""

    MEGATRON = "Megatron"
    FSDP = "FSDP"


class Precision(StrEnum):
    """Number formats of training."""

    BF16 = "bf16"
    FP32 = "fp32"


class LrSchedule(StrEnum):
    """Learning-rate schedules."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class OptimizerSpec(ApiModel):
    """Adam with decoupled weight decay; its state is divided over the trainers."""

    lr: Annotated[float, Field(gt=0, le=1)] = 1.0e-6
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate of the last update of a linear or cosine schedule; 0 is reached one update later."""
    schedule: LrSchedule = LrSchedule.CONSTANT
    """Shape after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer updates over which the rate rises linearly from 0."""
    decay_steps: PositiveInt | None = None
    """Optimizer updates until `minLr` is reached; default: all of the job's."""
    weight_decay: Fraction = 0.0
    """Decoupled weight decay; not applied to norms and biases."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Adam's first moment decay."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.98
    """Adam's second moment decay (slime's 0.98)."""
    eps: PositiveFloat = 1.0e-8
    """Adam's epsilon."""
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient norm is clipped to this; 0 switches clipping off."""
    host_offload: bool = False
    """Keep optimizer state in host memory between updates."""


class Recompute(StrEnum):
    """Activation recomputation."""

    NONE = "None"
    FULL = "Full"
    SELECTIVE = "Selective"


class FsdpSpec(ApiModel):
    """Sharding by FSDP of parameters, gradients and optimizer state: row by row, a layer is gathered where it
    computes."""

    shard_size: GroupSize | None = None
    """Devices that divide one copy of the model; must divide the trainers; default: all of them."""
    reshard_after_forward: bool = True
    """Gather a layer's weights again for the backward pass; false: keep all of them between the two, which takes the
    memory of the whole model."""


ModuleName = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9_]+$")]


class LoraHandover(StrEnum):
    """Forms in which engines get adapters."""

    MERGED = "Merged"
    ADAPTERS = "Adapters"


class LoraSpec(ApiModel):
    """Low-rank adapters: of a linear module with weights W, A and B are trained; trainers and engines compute with
    W + alpha / rank B A."""

    rank: Annotated[int, Field(ge=1, le=512, json_schema_extra={"format": "int32"})] = 16
    """Rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """Alpha / rank is what B A is multiplied by."""
    targets: Annotated[list[ModuleName], Field(min_length=1, max_length=64)] | None = None
    """Names of linear modules in the model's layers, such as `q_proj`; default: all of them. Experts that are one
    parameter of many, the embedding and the head stay as they are."""
    handover: LoraHandover = LoraHandover.MERGED
    """`Merged`: engines get whole weights with the adapters in them, rounded to the format of W, and trainers compute
    with the same bits. `Adapters`: engines get A and B alone, a hundredth of the bytes, and compute with them beside W,
    which takes them longer; only in mode `Disaggregated` or `Async`."""


class TrainingSpec(ApiModel):
    """Training by Megatron-core, or by FSDP. Data parallel size is devices / (tensor x pipeline x context parallel
    size)."""

    backend: TrainingBackend = TrainingBackend.MEGATRON
    """`Megatron`: Qwen2, Qwen3, Qwen3-MoE and Qwen3.5 with tensor, pipeline and expert parallelism. `FSDP`: any model
    of text that transformers and vLLM both have, its layers gathered one at a time."""
    fsdp: FsdpSpec | None = None
    """Only with backend `FSDP`."""
    lora: LoraSpec | None = None
    """Train low-rank adapters alone, the model's own weights stay as they are; only with backend `FSDP`. Default: all
    parameters are trained."""
    tensor_parallel: GroupSize = 1
    """Tensor parallel size."""
    pipeline_parallel: GroupSize = 1
    """Pipeline parallel size. A model replica's stages lie on one node, or on several where one has too few devices."""
    context_parallel: GroupSize = 1
    """Context parallel size: devices that divide each row's tokens among them, for samples as many times as long; must
    divide the heads of a tensor-parallel rank."""
    expert_parallel: GroupSize = 1
    """Expert parallel size (mixture-of-experts models)."""
    precision: Precision = Precision.BF16
    """`bf16` with fp32 master weights and gradients, or `fp32` throughout."""
    global_batch_size: PositiveInt | None = None
    """Samples in one optimizer update; must divide promptsPerStep x samplesPerPrompt; default: all of them (one update
    a step)."""
    max_tokens_per_micro_batch: TokenCount = 16384
    """Tokens in one micro-batch, a row of samples without padding, before `contextParallel` divides it; a longer sample
    is a row of its own."""
    recompute: Recompute = Recompute.NONE
    """Activation recomputation; `Selective` (MLPs alone) is Megatron's."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """Optimizer and schedule."""
