"""Memory of a vLLM engine, for each of its tensor-parallel ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rljob_api import derived
from rljob_api.profiles import PROFILES
from rljob_api.spec import RLJobSpec
from rljob_worker.engine.arguments import max_model_length, max_sequences
from rljob_worker.engine.graphs import capture_sizes
from rljob_worker.engine.platforms import CPU_KV_CACHE_BYTES
from rljob_worker.models.facts import ModelFacts
from rljob_worker.models.trained import TrainedModel, checkpoint_tensors
from rljob_worker.planning.job_shape import JobShape, itemsize, prompt_tokens

_LOGITS_COPIES = 4
"""fp32 rows of the vocabulary a sequence: gathered logits, processed log-probabilities, and the sampler's sort."""
_VLLM_LARGE_DEVICE = 70 * 2**30
GRAPH_BYTES = 16 * 2**20
"""Bytes of one captured size: a driver's record of a step's launches, and a part of the graphs' pool. Assumed: vLLM
logs 0.5 to 1 GiB for the 35 to 67 sizes that it captures by itself."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on one device while the engine is awake."""

    weights: int
    kv_cache: int
    work: int
    """Largest scheduler step: activations, logits and sampling."""
    kv_bytes_per_token: int
    kv_needed: int
    """For one sequence of the longest length, below which vLLM does not start."""
    kv_wanted: int
    """For all sequences that run at once, each as long as it may be."""
    landing: int
    """While weights land: copies of the largest module that wait for its other tensors."""
    graphs: int = 0
    """Captured graphs, which do not sleep."""

    @property
    def sequences(self) -> float:
        """Longest sequences that the cache holds at once."""
        return self.kv_cache / self.kv_needed


def engine_memory(
    spec: RLJobSpec,
    model: TrainedModel,
    job: JobShape,
    device_bytes: int | None,
    outside: int,
    module_elements: int,
    adapter_elements: int = 0,
) -> EngineMemory:
    """Memory that vLLM will allocate.

    KV cache: `rollout.kvCacheBytes` on each device as vLLM takes it (`kv_cache_memory_bytes`, its default 1 GiB on
    cpu); else what is left of `memoryFraction` after weights, the profiled step and what is not torch's
    (vllm/v1/worker/gpu_worker.py, determine_available_memory).

    Args:
        spec: the job.
        model: its model.
        job: what the job is made of.
        device_bytes: memory of a device; None on cpu.
        outside: bytes of the engine's process that torch did not allocate (runtime, communicators).
        adapter_elements: of what it has beside the model's weights.
        module_elements: of the largest group of tensors that the layerwise reload completes at once.
    """
    size, tp = itemsize(spec), job.engine_tp
    weights = _weights(model, tp) * size + adapter_elements * size
    work = _step(spec, model, tp, size, device_bytes)
    profile = PROFILES[spec.resources.profile]
    graphs = GRAPH_BYTES * len(capture_sizes(spec)) if spec.rollout.graph_mode and profile.has_devices else 0
    if profile.kind == "cuda":
        outside += graphs  # as vLLM estimates it; vllm-ascend leaves it out
    per_token = kv_bytes_per_token(model, tp, size)
    cache = spec.rollout.kv_cache_bytes
    if cache is None:
        if device_bytes is None:
            cache = CPU_KV_CACHE_BYTES
        else:
            cache = max(0, int(spec.rollout.memory_fraction * device_bytes) - weights - work - outside)
    length = max_model_length(spec, model)
    return EngineMemory(
        weights=weights,
        kv_cache=cache,
        work=work,
        kv_bytes_per_token=per_token,
        kv_needed=per_token * length,
        kv_wanted=per_token * _usual_length(spec, length) * max_sequences(spec),
        landing=module_elements * size,
        graphs=graphs,
    )


def kv_bytes_per_token(model: ModelFacts, tp: int, size: int) -> int:
    """Key and value of each layer: 2 x layers x heads x width x bytes (vllm/v1/kv_cache_interface.py,
    FullAttentionSpec.page_size_bytes / block_size). Above the number of key/value heads, ranks hold copies.

    Linear attention has a state of fixed size for each sequence instead, which is left out.
    """
    heads = max(1, model.num_query_groups // tp)
    layers = sum(not model.is_linear(layer) for layer in range(model.num_layers))
    return 2 * layers * heads * model.head_dim * size


def _usual_length(spec: RLJobSpec, longest: int) -> int:
    return min(longest, derived.longest_sample(spec, prompt_tokens(spec)[0]))


def _weights(model: TrainedModel, tp: int) -> int:
    """Elements on one rank: matrices and vocabulary are cut, norms and routers are not; experts are cut like MLPs."""
    elements = 0
    for name, shape in checkpoint_tensors(model).trained:
        count = math.prod(shape)
        if len(shape) == 2 and shape[0] == model.vocab_size:
            elements += count // model.vocab_size * (-(-model.vocab_size // (64 * tp)) * 64)
        elif "norm" in name or name.endswith("mlp.gate.weight"):
            elements += count
        else:
            # Key and value heads are copied where there are fewer of them than ranks.
            copies = max(1, tp // model.num_query_groups) if name.split(".")[-2] in ("k_proj", "v_proj") else 1
            elements += count * copies // tp
    return elements


def _step(spec: RLJobSpec, model: ModelFacts, tp: int, size: int, device_bytes: int | None) -> int:
    """One scheduler step without gradients: a layer's tensors at a time, then fp32 logits of each sequence.

    The default of `max_num_batched_tokens` is vLLM 0.23's for its offline class: 8192, 16384 on devices of 70 GiB and
    more, 4096 x ranks on cpu (vllm/engine/arg_utils.py).
    """
    default = 16384 if (device_bytes or 0) >= _VLLM_LARGE_DEVICE else 8192
    if not PROFILES[spec.resources.profile].has_devices:
        default = 4096 * tp
    prompts = -(
        -derived.prompts_at_once(spec) * spec.rollout.samples_per_prompt // derived.fewest_engines(spec)
    ) * max_model_length(spec, model)
    tokens = min(spec.rollout.max_batched_tokens or default, prompts)
    heads = (model.num_heads + 2 * model.num_query_groups) * model.head_dim
    layer = 4 * model.hidden_size + (2 * heads + 3 * model.mlp_width) // tp
    return tokens * layer * size + max_sequences(spec) * model.vocab_size * 4 * _LOGITS_COPIES
