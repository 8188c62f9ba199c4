"""From a job's spec to vLLM's engine arguments."""

from __future__ import annotations

from rljob_api.derived import adapters_apart, longest_sequence, max_sequences, prompts_have_room
from rljob_api.spec import Precision, RLJobSpec, TrainingBackend
from rljob_worker.devices.kinds import device_kind
from rljob_worker.engine.adapters import adapted_names
from rljob_worker.engine.platforms import MERGED, engine_platform
from rljob_worker.errors import UserError
from rljob_worker.models.facts import PICTURE_MODELS, ModelFacts

_PICTURES = {"image": 1, "video": 0}
"""Inputs that vLLM makes room for when it starts: it takes pictures one by one, however many a prompt has."""


def max_model_length(spec: RLJobSpec, model: ModelFacts) -> int:
    """Longest sequence in tokens that the engine has to hold: the model's length, or less where that is known."""
    given = spec.rollout.engine_args.get("max_model_len")
    if isinstance(given, int) and given > 0:
        return given
    longest = longest_sequence(spec)
    return model.max_position_embeddings if longest is None else min(model.max_position_embeddings, longest)


def longest_prompt(spec: RLJobSpec, model: ModelFacts) -> int:
    """Tokens of the longest prompt that an engine has room for beside its answer; UserError where there is none."""
    field, tokens = prompts_have_room(spec)
    return room_for_prompts(max_model_length(spec, model), f"spec.{field}", tokens)


def room_for_prompts(length: int, field: str, response_tokens: int) -> int:
    """Tokens of an engine's length left beside an answer; UserError, which names `field`, where there are none."""
    room = length - response_tokens
    if room < 1:
        raise UserError(f"{field}: {response_tokens} leaves no room for a prompt; an engine takes {length} tokens")
    return room


def engine_arguments(spec: RLJobSpec, model_folder: str) -> dict[str, object]:
    """Keyword arguments of vLLM's EngineArgs on the job's kind of device.

    Raises:
        UserError: `spec.rollout.engineArgs` names something that RLJob sets itself.
    """
    rollout = spec.rollout
    model = ModelFacts.from_hf(model_folder)
    own: dict[str, object] = {
        "model": model_folder,
        # Prompts come as tokens and log-probabilities leave as numbers; stop strings bring their own tokenizer.
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "tensor_parallel_size": rollout.tensor_parallel,
        "dtype": "bfloat16" if spec.training.precision is Precision.BF16 else "float32",
        "seed": spec.seed & 0xFFFFFFFF,
        # vLLM's default is the distribution before temperature, top-k, top-p and min-p: not the one sampled from.
        "logprobs_mode": "processed_logprobs",
        "enforce_eager": not rollout.graph_mode,
        "enable_prefix_caching": rollout.prefix_caching,
        "max_num_seqs": max_sequences(spec),
        "disable_log_stats": True,
        # Inside a Ray actor vLLM would choose its Ray executor; an engine runs its own processes.
        "distributed_executor_backend": "mp" if rollout.tensor_parallel > 1 else None,
    }
    if model.model_type in PICTURE_MODELS and spec.training.backend is TrainingBackend.FSDP:
        # vLLM's processor of pictures, of which it asks for sizes alone, is made with the tokenizer.
        own |= {"skip_tokenizer_init": False, "mm_processor_cache_gb": 0, "limit_mm_per_prompt": _PICTURES}
    elif model.language_half:
        # Without it the engine would load a vision tower that no weight sync fills.
        own["language_model_only"] = True
    if model.linear_attention is not None:
        # What published checkpoints ask for; vLLM's kernels on CPU take no other state.
        own["mamba_ssm_cache_dtype"] = "float32"
    if rollout.max_batched_tokens is not None:
        own["max_num_batched_tokens"] = rollout.max_batched_tokens
    if rollout.speculative is not None:
        own["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": rollout.speculative.draft_tokens,
            "prompt_lookup_min": rollout.speculative.min_match,
            "prompt_lookup_max": rollout.speculative.max_match,
        }
    lora = adapters_apart(spec)
    if lora is not None:
        own |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": lora.rank}
        # What has no adapter is computed as without any: vLLM 0.23 gives no prompt's log-probabilities otherwise.
        own["lora_target_modules"] = adapted_names(model_folder, lora)
    if rollout.router_replay:
        own["enable_return_routed_experts"] = True
    platform = engine_platform(device_kind(spec.resources).name)
    own |= platform.arguments(spec)
    if rollout.graph_mode:
        own |= platform.graphs(spec)
    clashes = sorted((own.keys() - MERGED) & rollout.engine_args.keys())
    if clashes:
        raise UserError(
            f"spec.rollout.engineArgs: {', '.join(clashes)}: set by RLJob from other fields; remove from engineArgs"
        )
    # A default of RLJob's that the spec has no field for may be narrowed.
    given = {name: value for name, value in rollout.engine_args.items() if name not in own}
    return own | {"max_model_len": max_model_length(spec, model)} | given
