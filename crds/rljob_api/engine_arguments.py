"""vLLM's engine arguments as far as a manifest can be judged by them without vLLM.

Source: `EngineArgs` of vLLM 0.23 (vllm/engine/arg_utils.py); a test compares the kinds with the installed one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rljob_api.spec.rollout import RESERVED_ENGINE_ARGS

_WHOLE = "a whole number"
_KINDS: dict[str, tuple[str, ...]] = {
    _WHOLE: (
        *("block_size", "max_model_len", "max_num_partial_prefills", "max_long_partial_prefills", "mamba_block_size"),
        *("long_prefill_token_threshold", "max_logprobs", "distributed_timeout_seconds"),
        *("cpu_distributed_timeout_seconds", "max_cudagraph_capture_size", "max_parallel_loading_workers"),
        *("ubatch_size", "dbo_decode_token_threshold", "dbo_prefill_token_threshold", "stream_interval"),
        *("safetensors_prefetch_num_threads", "safetensors_prefetch_block_size", "renderer_num_workers"),
    ),
    "true or false": (
        *("enable_chunked_prefill", "enable_expert_parallel", "enable_eplb", "async_scheduling", "enable_dbo"),
        *("disable_cascade_attn", "disable_sliding_window", "disable_custom_all_reduce", "enable_mfu_metrics"),
        *("disable_hybrid_kv_cache_manager", "use_fp64_gumbel", "calculate_kv_scales", "kv_sharing_fast_prefill"),
        *("numa_bind", "kv_cache_metrics", "cudagraph_metrics", "scheduler_reserve_full_isl", "enable_log_requests"),
        *("use_tqdm_on_load", "aggregate_engine_logging", "enable_logging_iteration_details", "enable_elastic_ep"),
        *("enable_flashinfer_autotune", "fail_on_environ_validation", "enable_layerwise_nvtx_tracing"),
    ),
    "a number": ("cpu_offload_gb", "kv_offloading_size", "mm_processor_cache_gb"),
    "a string": (
        *("kv_cache_dtype", "attention_backend", "moe_backend", "linear_backend", "all2all_backend", "download_dir"),
        *("scheduling_policy", "performance_mode", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode"),
        *("prefix_caching_hash_algo", "expert_placement_strategy", "safetensors_load_strategy", "config_format"),
        *("generation_config", "offload_backend", "dcp_comm_backend", "override_attention_dtype"),
    ),
    "a list": ("cudagraph_capture_sizes", "numa_bind_nodes", "numa_bind_cpus", "kv_cache_dtype_skip_layers"),
    "a mapping": (
        *("additional_config", "model_loader_extra_config", "override_generation_config"),
        *(
            "compilation_config",
            "attention_config",
            "kernel_config",
            "mamba_config",
            "eplb_config",
            "structured_outputs_config",
        ),
    ),
}
KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
_TYPES: dict[str, tuple[type, ...]] = {
    _WHOLE: (int,),
    "true or false": (bool,),
    "a number": (int, float),
    "a string": (str,),
    "a list": (list,),
    "a mapping": (dict,),
}
_CACHES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
_STATES = ("auto", "float32", "float16", "bfloat16")
WORDS = {
    # Those of vLLM's that keep a cache which the model's own attention reads.
    "kv_cache_dtype": _CACHES,
    "mamba_cache_dtype": _STATES,
    "mamba_ssm_cache_dtype": _STATES,
    "mamba_cache_mode": ("all", "align", "none"),
    "attention_backend": ("CPU_ATTN", "CUSTOM", "FLASHINFER", "FLASH_ATTN", "FLEX_ATTENTION", "TRITON_ATTN"),
    "config_format": ("auto", "hf"),
    "scheduling_policy": ("fcfs", "priority"),
    "performance_mode": ("balanced", "interactivity", "throughput"),
    "prefix_caching_hash_algo": ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"),
}
"""Arguments with a few values."""
_BLOCK = 16
"""Tokens: what vLLM's attention on CPU and FlashAttention's on GPUs take multiples of, and others multiples of that."""
_FROM_0 = ("long_prefill_token_threshold", "max_logprobs")
_MODEL = "leave it out: the model is what its folder's config.json says"
_ROLE = "leave it out: engines generate tokens"
_ALONE = "leave it out: an engine is one tensor-parallel group on one node"
_OWN = "leave it out: RLJob's sampling and weight sync are made for vLLM's own"
REFUSED = {
    **dict.fromkeys(("quantization", "quantization_config", "allow_deprecated_quantization"),
                    "leave it out: weights come from the trainer as they are"),
    **dict.fromkeys(("model_weights", "hf_config_path", "hf_overrides", "code_revision", "tokenizer_revision"), _MODEL),
    "num_gpu_blocks_override": "spec.rollout.kvCacheBytes instead",
    "served_model_name": "leave it out: nothing is served",
    "hf_token": "leave it out: the model is a local folder by then; HF_TOKEN in a Secret of environment.secrets",
    **dict.fromkeys(("runner", "convert", "pooler_config", "enable_prompt_embeds", "tokens_only"), _ROLE),
    **dict.fromkeys(("model_impl", "worker_cls", "scheduler_cls", "logits_processors", "io_processor_plugin"), _OWN),
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank", "default_mm_loras"),
                    "leave it out: spec.training.lora says what engines have of adapters"),
    **dict.fromkeys(
        ("data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local", "data_parallel_address",
         "data_parallel_rpc_port", "data_parallel_hybrid_lb", "data_parallel_external_lb", "data_parallel_backend",
         "nnodes", "node_rank", "master_addr", "master_port", "prefill_context_parallel_size",
         "decode_context_parallel_size"),
        _ALONE,
    ),
    **dict.fromkeys(("kv_transfer_config", "kv_events_config", "ec_transfer_config", "kv_offloading_backend"),
                    "leave it out: an engine keeps its cache to itself, and forgets it with each new version"),
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), "spec.rollout.speculative instead"),
}  # fmt: skip
"""Arguments with which an engine would not start, or not sample from what is trained -> what to do instead."""


def value_faults(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(argument, what is wrong, what is allowed) of values that vLLM would refuse, or that RLJob cannot work with."""
    for name, value in arguments.items():
        kind = KIND_OF.get(name)
        if name in RESERVED_ENGINE_ARGS:
            continue
        if name in REFUSED:
            yield name, "an engine of RLJob cannot be run with it", REFUSED[name]
        elif kind is None or value is None:
            continue
        elif not isinstance(value, _TYPES[kind]) or (kind != "true or false" and isinstance(value, bool)):
            yield name, f"is not {kind}", f"{kind}, as vLLM has it"
        elif name in WORDS and value not in WORDS[name]:
            yield name, "is not one of its values", ", ".join(WORDS[name])
        elif isinstance(value, int | float) and not isinstance(value, bool):
            least = 1 if kind == _WHOLE and name not in _FROM_0 else 0
            if not least <= value <= 2**31 - 1:
                yield name, "is too small" if value < least else "is too large", f"{least} to {2**31 - 1}"
            elif name == "block_size" and value % _BLOCK:
                yield name, "is no size that attention kernels have", f"a multiple of {_BLOCK}"
