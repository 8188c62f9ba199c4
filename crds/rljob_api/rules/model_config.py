"""The Hugging Face config of a model, as far as it can be judged without any library."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from rljob_api.derived import longest_sequence
from rljob_api.how_many import how_many
from rljob_api.profiles import PROFILES
from rljob_api.rules.findings import Check, Finding
from rljob_api.spec import Precision, RLJobSpec, TrainingBackend

MODEL_TYPES = ("qwen2", "qwen3", "qwen3_moe")
CHECKPOINT_TYPES = (*MODEL_TYPES, "qwen3_5")
"""The first ones are made with random weights too."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM 0.23's CPU attention has kernels for; repeated here because importing vLLM takes seconds."""
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "max_position_embeddings", "vocab_size"),
)
_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Sizes that transformers takes no null for."""
_MOE_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
_NUMBERS = ("rms_norm_eps", "rope_theta", "initializer_range")
_OTHERS = (
    *("model_type", "architectures", "hidden_act", "tie_word_embeddings", "attention_bias", "attention_dropout"),
    *("rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    *("use_cache", "dtype", "torch_dtype", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("quantization_config", "_name_or_path", "name_or_path", "auto_map", "pretraining_tp"),
)
_MOE_OTHERS = ("mlp_only_layers", "norm_topk_prob", "output_router_logits", "router_aux_loss_coef")
_LARGEST = 2**31 - 1
_MOST = {"num_hidden_layers": 1000, "num_experts": 4096, "vocab_size": 2**24, "max_position_embeddings": 2**24}
"""Sizes that are counted through, tensor by tensor, or of which engines make tables: the largest models have 126
layers, 512 experts, 262144 tokens and 10485760 positions."""
_MOST_EXPERTS = 200_000
"""Number of experts of all layers together."""
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_DTYPES = ("float32", "bfloat16", "float16", "auto")
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
}


def config_findings(config: Mapping[str, Any], backend: TrainingBackend) -> Iterator[Finding]:
    """Findings about a config that RLJob is to build a model from."""
    kind = config.get("model_type")
    if backend == TrainingBackend.FSDP and kind not in MODEL_TYPES:
        # transformers has the model, and says what it takes.
        if not isinstance(kind, str) or not kind:
            at = ("model_type",) if "model_type" in config else ()
            yield Finding(at, "names no model", "model_type: as transformers and vLLM call it, like llama")
        yield from _of_any(config)
        return
    if kind not in MODEL_TYPES:
        yield Finding(("model_type",) if "model_type" in config else (), "names no model that is built",
                      f"model_type: {', '.join(MODEL_TYPES)}")  # fmt: skip
        return
    sizes = _sizes_of(config)
    known = {*sizes, *_NUMBERS, *_OTHERS, *(_MOE_OTHERS if kind == "qwen3_moe" else ())}
    for key in config:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
            hint = f", did you mean {near[0]}?" if near else ""
            yield Finding((key,), f"unknown setting of a {kind} model{hint}", ", ".join(sorted(known)))
    yield from _of_values(config)
    yield from _divisible(config)


def value_findings(config: Mapping[str, Any], backend: TrainingBackend) -> Iterator[Finding]:
    """Findings about the config of a checkpoint, which may have more than RLJob reads, and null for a default."""
    language = config.get("text_config")
    if backend == TrainingBackend.FSDP:
        yield from _of_any({key: value for key, value in config.items() if value is not None})
        if isinstance(language, Mapping):
            yield from (_no_size("text_config", key) for key in _MOST if (size_of(language, key) or 0) > _MOST[key])
        return
    if isinstance(language, Mapping):
        for finding in value_findings(language, backend):
            yield Finding(("text_config", *finding.path), finding.wrong, finding.allowed)
        return
    given = {key: value for key, value in config.items() if value is not None or key in _NEEDED}
    yield from _of_values(given)
    yield from _divisible(given)


def _of_any(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings that hold for every model, whatever else its family's settings are."""
    yield from size_findings(config)
    for key in ("dtype", "torch_dtype"):
        if key in config and not _is_dtype(config[key]):
            yield Finding((key,), "is no type of weights that is read", ", ".join(_DTYPES))
    yield from _divisible(config)


def _sizes_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    return (*_SIZES, *_MOE_SIZES) if config.get("model_type") == "qwen3_moe" else _SIZES


def _no_size(*path: str) -> Finding:
    return Finding(path, "is no size", f"whole number, at least 1 and at most {_MOST.get(path[-1], _LARGEST)}")


def size_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Sizes that are none, or so large that a library that makes a config of them would not end."""
    for key in _sizes_of(config):
        if key in config and not (type(config[key]) is int and 1 <= config[key] <= _MOST.get(key, _LARGEST)):
            yield _no_size(key)
    layers, experts = size_of(config, "num_hidden_layers"), size_of(config, "num_experts")
    if layers and experts and layers * experts > _MOST_EXPERTS:
        yield Finding(
            ("num_experts",), f"is too many for {how_many(layers, 'layer')}", f"at most {_MOST_EXPERTS // layers}"
        )


def _of_values(config: Mapping[str, Any]) -> Iterator[Finding]:
    yield from size_findings(config)
    for key, value in config.items():
        if key in _NUMBERS and not (type(value) in (int, float) and 0 < value <= 1e12):
            yield Finding((key,), "is no such number", "number, above 0 and at most 1e12")
        elif key in _FIXED and value not in _FIXED[key]:
            yield Finding((key,), "is not built", str(_FIXED[key][0]).lower())
        elif key == "tie_word_embeddings" and not isinstance(value, bool):
            yield Finding((key,), "must be true or false", "true or false")
        elif key in _TOKENS and not _token_ids(value, size_of(config, "vocab_size")):
            yield Finding((key,), "is no token of the model", "a token id below vocab_size, or for eos_token_id a list")
        elif key == "layer_types" and not _plain_layers(config):
            yield Finding((key,), "is no list of the layers that are built", "full_attention for each layer")
        elif key in ("dtype", "torch_dtype") and not _is_dtype(value):
            yield Finding((key,), "is no type of weights that is read", ", ".join(_DTYPES))
        elif key in ("rope_scaling", "rope_parameters") and not _plain_rope(value):
            yield Finding((key,), "this rope is not built", "rope_type: default")


def _token_ids(value: Any, vocabulary: int | None) -> bool:
    ids = value if isinstance(value, list) else [value]
    return value is None or all(type(i) is int and 0 <= i < (vocabulary or _LARGEST) for i in ids)


def _plain_layers(config: Mapping[str, Any]) -> bool:
    layers, kinds = size_of(config, "num_hidden_layers"), config.get("layer_types")
    if "linear_num_key_heads" in config or kinds is None:
        return True
    return isinstance(kinds, list) and len(kinds) == layers and all(kind == "full_attention" for kind in kinds)


def _is_dtype(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.removeprefix("torch.") in _DTYPES)


def _plain_rope(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict) or value.get("rope_type", value.get("type", "default")) != "default":
        return False
    theta = value.get("rope_theta", 1.0)
    return type(theta) in (int, float) and 0 < theta <= 1e12


def size_of(config: Mapping[str, Any], name: str) -> int | None:
    """A size, where the config has one."""
    value = config.get(name)
    return value if type(value) is int and value > 0 else None


def _divisible(config: Mapping[str, Any]) -> Iterator[Finding]:
    heads, groups = size_of(config, "num_attention_heads"), size_of(config, "num_key_value_heads")
    if heads and groups and heads % groups:
        yield Finding(("num_key_value_heads",), f"does not divide num_attention_heads ({heads})", "a divisor of it")
    experts, chosen = size_of(config, "num_experts"), size_of(config, "num_experts_per_tok")
    if experts and chosen and chosen > experts:
        yield Finding(("num_experts_per_tok",), f"is more than num_experts ({experts})", f"at most {experts}")


def _expert_cut(training: Any) -> int:
    """Ranks that an expert is cut over: experts that are dealt out are whole."""
    return training.tensor_parallel if training.expert_parallel == 1 else 1


def _context_findings(config: Mapping[str, Any], training: Any) -> Iterator[Finding]:
    """Heads that context-parallel ranks cannot divide: in attention each has all tokens of a share of them."""
    context, tensor = training.context_parallel, training.tensor_parallel
    for name, what in (("num_attention_heads", "heads"), ("num_key_value_heads", "key heads")):
        value = size_of(config, name)
        if value and value % tensor == 0 and value // tensor % context:
            own = f"{value // tensor} {what} of a tensor-parallel rank ({name} {value} / {tensor})"
            yield Finding(("training", "contextParallel"), f"does not divide the {own}", "a divisor of them")


def parallel_findings(config: Mapping[str, Any], spec: Any) -> Iterator[Finding]:
    """Findings about a job's parallel sizes and lengths that do not fit its model.

    Args:
        config: the model's.
        spec: the job's, with snake_case attributes.
    """
    training, engine = spec.training, spec.rollout.tensor_parallel
    is_moe = config.get("model_type") == "qwen3_moe"
    for name, size, field in (
        ("num_attention_heads", training.tensor_parallel, ("training", "tensorParallel")),
        ("num_key_value_heads", training.tensor_parallel, ("training", "tensorParallel")),
        ("intermediate_size", training.tensor_parallel, ("training", "tensorParallel")),
        ("num_hidden_layers", training.pipeline_parallel, ("training", "pipelineParallel")),
        ("num_experts", training.expert_parallel if is_moe else 1, ("training", "expertParallel")),
        ("moe_intermediate_size", _expert_cut(training) if is_moe else 1, ("training", "tensorParallel")),
        ("num_attention_heads", engine, ("rollout", "tensorParallel")),
    ):
        value = size_of(config, name)
        if value and value % size:
            yield Finding(field, f"does not divide the model's {name} ({value})", "a divisor of it")
    yield from _context_findings(config, training)
    if training.expert_parallel > 1 and config.get("model_type") in ("qwen2", "qwen3"):
        yield Finding(("training", "expertParallel"), "the model has no experts", "1")
    if spec.rollout.router_replay and config.get("model_type") in ("qwen2", "qwen3", "qwen3_5"):
        yield Finding(("rollout", "routerReplay"), "the model has no experts", "false")
    yield from _on_cpu(config, spec)
    yield from _adapters_of(config, spec)
    yield from _tokens_of(config, spec)
    yield from _cache_of(config, spec)
    positions = size_of(config, "max_position_embeddings")
    for block in ("rollout", "evaluation"):
        tokens = getattr(getattr(spec, block), "max_response_tokens", None)
        if positions and tokens is not None and tokens >= positions:
            wrong = f"leaves no room for a prompt: the model takes {positions} tokens"
            yield Finding((block, "maxResponseTokens"), wrong, f"below max_position_embeddings ({positions})")
    if positions and spec.episodes is not None and spec.episodes.max_tokens > positions:
        wrong = f"is more than the model takes (max_position_embeddings {positions})"
        yield Finding(("episodes", "maxTokens"), wrong, f"at most {positions}")


LINEAR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear modules in a layer of qwen2 and qwen3; those of other models are looked at when one is built."""


def _language(config: Mapping[str, Any]) -> Mapping[str, Any]:
    language = config.get("text_config")
    return language if isinstance(language, Mapping) else config


def _head_size(config: Mapping[str, Any]) -> int | None:
    """Width of a head, where the config says it: transformers' default is another one for each kind of model."""
    width, heads = size_of(config, "hidden_size"), size_of(config, "num_attention_heads")
    of_width = width // heads if width and heads and config.get("model_type") == "qwen2" else None
    return size_of(config, "head_dim") or of_width


def _on_cpu(config: Mapping[str, Any], spec: Any) -> Iterator[Finding]:
    """Findings about features that vLLM computes on devices alone."""
    if PROFILES[spec.resources.profile].has_devices:
        return
    head = _head_size(_language(config))
    if head and head not in CPU_HEAD_SIZES:
        at = ("model", "path") if spec.model.random is None else ("model", "random", "config", "head_dim")
        yield Finding(at, f"vLLM's attention on CPU has no kernel for a head_dim of {head}",
                      ", ".join(map(str, CPU_HEAD_SIZES)))  # fmt: skip
    if config.get("model_type") == "qwen3_5" and spec.training.precision != Precision.BF16:
        yield Finding(("training", "precision"), "vLLM's linear attention on CPU computes in bf16 alone", "bf16")


_WITH_THOSE_LINEAR_MODULES = ("qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2")


def _adapters_of(config: Mapping[str, Any], spec: Any) -> Iterator[Finding]:
    """Adapters of modules that there are not, and of a rank that no module has."""
    lora = spec.training.lora
    if lora is None:
        return
    known = LINEAR_MODULES if config.get("model_type") in _WITH_THOSE_LINEAR_MODULES else ()
    for i, target in enumerate(lora.targets or ()):
        if known and target not in known:
            yield Finding(("training", "lora", "targets", i), "is no linear module of the model's layers",
                          ", ".join(known))  # fmt: skip
    width = size_of(_language(config), "hidden_size")
    if width and lora.rank > width:
        yield Finding(("training", "lora", "rank"), "is more than the rank of what it is added to",
                      f"at most the model's hidden_size ({width})")  # fmt: skip


def _tokens_of(config: Mapping[str, Any], spec: Any) -> Iterator[Finding]:
    vocabulary = size_of(_language(config), "vocab_size")
    for i, token in enumerate(spec.rollout.stop_token_ids):
        if vocabulary and token >= vocabulary:
            wrong = f"is no token of the model, whose vocab_size is {vocabulary}"
            yield Finding(("rollout", "stopTokenIds", i), wrong, f"below {vocabulary}")


def _cache_of(config: Mapping[str, Any], spec: Any) -> Iterator[Finding]:
    """An engine's KV cache, which vLLM refuses below what one sequence of the longest length takes."""
    config = _language(config)
    needed, cache = _sequence_bytes(config, spec), spec.rollout.kv_cache_bytes
    if needed and cache is not None and cache < needed[1]:
        wrong = f"is less than one sequence of {needed[0]} tokens takes ({needed[1]} bytes)"
        yield Finding(("rollout", "kvCacheBytes"), wrong, f"at least {needed[1]}")
    given, positions = spec.rollout.engine_args.get("max_model_len"), size_of(config, "max_position_embeddings")
    if type(given) is int and positions and given > positions:
        wrong = f"is more than the model takes (max_position_embeddings {positions})"
        yield Finding(("rollout", "engineArgs", "max_model_len"), wrong, f"at most {positions}")


def _sequence_bytes(config: Mapping[str, Any], spec: Any) -> tuple[int, int] | None:
    """Tokens of the longest sequence and bytes of its keys and values on one device; None: the config does not say.

    2 x layers x heads x width x bytes for each token (vllm/v1/kv_cache_interface.py).
    """
    layers, heads = size_of(config, "num_hidden_layers"), size_of(config, "num_attention_heads")
    head, positions = _head_size(config), size_of(config, "max_position_embeddings")
    if not layers or not heads or not head or not positions or "linear_num_key_heads" in config:
        return None
    groups = size_of(config, "num_key_value_heads") or heads
    length, rollout = positions, spec.rollout
    given = rollout.engine_args.get("max_model_len")
    if type(given) is int and given > 0:
        length = min(length, given)
    elif (longest := longest_sequence(spec)) is not None:
        length = min(length, longest)
    size = 2 if spec.training.precision == Precision.BF16 else 4
    return length, 2 * layers * max(1, groups // rollout.tensor_parallel) * head * size * length


def _fits(spec: Any) -> Iterator[Finding]:
    if spec.model.random is not None:
        tokenizer = spec.model.random.tokenizer
        sources = spec.data.sources or [spec.data]
        special = 6 if any(source.apply_chat_template for source in sources) else 3
        if tokenizer.vocab_size <= special:
            wrong = f"leaves no room for words beside {special} special tokens"
            yield Finding(("model", "random", "tokenizer", "vocabSize"), wrong, f"above {special}")
        for finding in config_findings(spec.model.random.config, spec.training.backend):
            yield Finding(("model", "random", "config", *finding.path), finding.wrong, finding.allowed)
        vocabulary = {"vocab_size": tokenizer.vocab_size}
        yield from parallel_findings(vocabulary | spec.model.random.config, spec)


MODEL_CHECKS: dict[type, tuple[Check, ...]] = {RLJobSpec: (_fits,)}
