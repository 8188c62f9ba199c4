"""Parameters of one trainer rank, and the bytes of the state that trains them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from rljob_api.spec import Precision
from rljob_worker.models.config import ModelConfig
from rljob_worker.models.manifest import HEAD, embedding, final_norm, hf_manifest, layer_prefix
from rljob_worker.models.trained import TrainedModel, checkpoint_tensors
from rljob_worker.planning.job_shape import JobShape
from rljob_worker.trainer.state_buckets import BUFFERS, most_elements

_FP32 = 4


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Elements that one rank holds."""

    dense: int
    """Sharded over `dp` ranks by the distributed optimizer."""
    experts: int
    """Sharded over `expert_dp` ranks."""
    largest: int
    """Elements of its largest tensor."""
    at_once: tuple[int, ...]
    """Elements of Megatron's two largest parameters, at most: one may be two tensors of a layer."""

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.experts


@lru_cache(maxsize=256)
def rank_parameters(model: ModelConfig, job: JobShape, stage: int) -> RankParameters:
    """Count what `trainer.megatron.models.build.build_gpt_model` makes on a rank of a pipeline stage.

    Matrices are cut over tensor-parallel ranks, norms and routers are whole on each, experts are dealt out over expert
    parallel ranks; a last stage that is not the first has a copy of a tied embedding. Megatron's padding of its
    buffers (to 64 elements a parameter, `lcm(dp, 128)` a buffer) is left out: less than 1 % of any real model.
    """
    layers = tuple(layer_prefix(model, layer) for layer in job.layers(model, stage))
    dense = experts = in_layers = 0
    outside: list[int] = []
    for name, shape in hf_manifest(model):
        count = math.prod(shape)
        if name in (embedding(model), HEAD):
            count = count // model.vocab_size * (model.padded_vocab_size(job.trainers.tp) // job.trainers.tp)
            copies = (stage == 0 and name == embedding(model)) + (
                stage == job.trainers.pp - 1 and (name == HEAD or (model.tied_embeddings and job.trainers.pp > 1))
            )
            dense += count * copies
            outside += [count] * copies
            continue
        if name == final_norm(model) or name in model.value_head:
            dense += count * (stage == job.trainers.pp - 1)
            continue
        if not name.startswith(layers):
            continue
        if ".experts." in name:
            experts += count
            in_layers = max(in_layers, count // job.trainers.expert_tp)
        elif "norm" in name or name.endswith("mlp.gate.weight"):
            dense += count
        else:
            dense += count // job.trainers.tp
            in_layers = max(in_layers, count // job.trainers.tp)
    # All experts are alike, so those of one rank are this part of all.
    experts //= job.trainers.ep * job.trainers.expert_tp
    at_once = tuple(sorted([*outside, 2 * in_layers, 2 * in_layers])[-BUFFERS:])
    return RankParameters(dense, experts, max([*outside, in_layers]), at_once)


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Bytes of what a trainer rank keeps between micro-batches."""

    weights: int
    gradients: int
    optimizer: int
    exchanged: int
    """Largest buffer of gradients that is reduced over other ranks; 0 without any."""
    on_device: int
    """Bytes of the optimizer's state on the device during an update, where it is kept on the host."""
    trained: int
    """Bytes of the weights that updates change."""
    merging: int = 0
    """Bytes of adapters and one module's product of them, while merged weights are handed over."""


def training_state(parameters: RankParameters, job: JobShape, precision: Precision) -> TrainingState:
    """Flat buffers of `trainer.megatron`: weights, fp32 gradients, and this rank's part of Adam's state.

    Megatron's distributed optimizer in bf16 takes 2 + 4 + 12 / d bytes a parameter (weights; fp32 gradients; fp32
    masters and two moments over d data-parallel ranks), in fp32 training 4 + 4 + 8 / d: docs of Megatron-LM,
    "Distributed Optimizer", and `megatron/training/theoretical_memory_utils.py` (18 bytes a parameter, 6 + 12 / d).
    """
    bf16 = precision is Precision.BF16
    flats = 3 if bf16 else 2
    own = parameters.dense / job.trainers.dp + parameters.experts / job.trainers.expert_dp
    optimizer = round(own * _FP32 * flats)
    weights = parameters.total * (2 if bf16 else 4)
    return TrainingState(
        weights=weights,
        trained=weights,
        gradients=parameters.total * _FP32,
        optimizer=optimizer,
        exchanged=_FP32
        * max(
            parameters.dense if job.trainers.dp > 1 else 0,
            parameters.experts if job.trainers.expert_dp > 1 else 0,
        ),
        on_device=flats * most_elements(round(own), parameters.at_once) * _FP32,
    )


def model_parameters(model: TrainedModel) -> int:
    """Parameters of the whole model, as its authors count them (a tied embedding once)."""
    return sum(math.prod(shape) for _, shape in checkpoint_tensors(model).trained)
