"""Megatron's model, gradient buffers and optimizer for one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rljob_api.spec import OptimizerSpec, Precision, TrainingSpec
from rljob_worker.upstream.megatron_types import ChainedOptimizer, DistributedDataParallel

if TYPE_CHECKING:
    from rljob_worker.upstream.megatron_types import GptModel


def wrap_model(model: GptModel) -> DistributedDataParallel:
    """DistributedDataParallel with flat buffers, fp32 gradients, and gradients summed (not averaged) over ranks."""
    from megatron.core import distributed

    config = prepare_for_schedules(model)
    _mark_sharded_weights(model)
    wrapped: DistributedDataParallel = distributed.DistributedDataParallel(
        config,
        distributed.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=True,
            check_for_nan_in_grad=False,
        ),
        model,
    )
    return wrapped


def prepare_for_schedules(model: GptModel) -> Any:
    """Set what pipeline schedules read from the model's config; returns it."""
    config = model.config
    # The loss is divided by the whole batch's tokens already: Megatron must not divide by ranks or micro-batches too.
    config.calculate_per_token_loss = True
    config.variable_seq_lengths = config.pipeline_model_parallel_size > 1
    return config


def _mark_sharded_weights(model: torch.nn.Module) -> None:
    """Say which weights are cut over tensor-parallel ranks.

    Megatron does so only while it initialises weights. Without it the gradient norm counts rank 0's shards alone.
    """
    from megatron.core.tensor_parallel import layers

    dimensions: dict[type, int] = {
        layers.ColumnParallelLinear: 0,
        layers.RowParallelLinear: 1,
        layers.VocabParallelEmbedding: 0,
    }
    for module in model.modules():
        weight, dimension = getattr(module, "weight", None), dimensions.get(type(module))
        if weight is not None and dimension is not None and not hasattr(weight, "tensor_model_parallel"):
            layers.set_tensor_model_parallel_attributes(weight, True, dimension, 1)


def build_optimizer(ddp: DistributedDataParallel, training: TrainingSpec, backend: str) -> ChainedOptimizer:
    """Megatron's distributed AdamW; norms and biases are not decayed."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    spec: OptimizerSpec = training.optimizer
    bf16 = training.precision is Precision.BF16
    optimizer: ChainedOptimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=spec.lr,
            min_lr=spec.min_lr,
            weight_decay=spec.weight_decay,
            adam_beta1=spec.beta1,
            adam_beta2=spec.beta2,
            adam_eps=spec.eps,
            clip_grad=spec.clip_grad,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=True,
        ),
        [ddp],
        use_gloo_process_groups=backend != "gloo",
    )
    for group in optimizer.param_groups:
        # Megatron leaves both to its own scheduler: the multiplier is 0 for norms and biases.
        multiplier = group["wd_mult"]
        assert isinstance(multiplier, int | float)
        group["weight_decay"] = spec.weight_decay * multiplier
        group["fused"] = True
        group["foreach"] = False
    return optimizer
