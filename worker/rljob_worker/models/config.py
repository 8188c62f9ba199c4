"""Parameters of Megatron's models, from a Hugging Face model config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rljob_api.spec import TrainingSpec
from rljob_worker.errors import UserError
from rljob_worker.models.facts import HfConfig, ModelFacts, facts_of, hf_config, hf_source, language_config

SUPPORTED_MODEL_TYPES = ("qwen2", "qwen3", "qwen3_moe", "qwen3_5")
_SHARED_EXPERT = "its mixtures of experts have a shared expert, which neither training nor conversion has"
_MISSING = {
    "qwen3_next": _SHARED_EXPERT,
    "qwen3_5_moe": _SHARED_EXPERT,
    "qwen3_5_text": "vLLM 0.23 has no model for its language half alone; it has one for the whole, 'qwen3_5'",
}
"""Relatives of what is supported -> what is not built for them."""
_LINEAR, _FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ModelFacts):
    """Shape of a model that Megatron trains; sizes are in elements."""

    ffn_hidden_size: int
    """Width of a dense MLP."""
    norm_eps: float
    rope_theta: float
    qkv_bias: bool
    qk_norm: bool
    num_experts: int = 0
    """Routed experts of a mixture-of-experts layer; 0 in a dense model."""
    experts_per_token: int = 0
    expert_ffn_hidden_size: int = 0
    normalize_expert_weights: bool = True
    """Softmax over the chosen experts only, instead of over all of them."""
    rotary_fraction: float = 1.0
    """Share of each head that is rotated: its first elements."""
    output_gate: bool = False
    """Whether the query projection also makes what gates the output of full attention."""
    zero_centered_norms: bool = False
    """Whether norms scale by 1 + weight; that of a linear attention's output never does."""
    value_head: tuple[str, ...] = ()
    """A critic's: names of the tensors of its head, which gives one value a token in the place of logits."""

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, object]) -> ModelConfig:
        """Read the config of a checkpoint folder, or a config given as a dict.

        Raises:
            UserError: no readable config, or a model or setting that is not supported; names it.
        """
        return _from_dict(*hf_source(source))

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Rows of the embedding over all tensor-parallel ranks: the vocabulary rounded up to a multiple of them."""
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel

    def is_moe(self, layer: int) -> bool:
        """Whether a layer (0-based, over the whole model) is a mixture of experts."""
        return self.num_experts > 0 and self.moe_layers[layer]

    def critic(self, head: tuple[str, ...]) -> ModelConfig:
        """The same layers with a head of one value a token, whose tensors are called so."""
        return replace(self, value_head=head, tied_embeddings=False)

    @property
    def untrained(self) -> tuple[str, ...]:
        """Prefixes of the names of tensors that a checkpoint has beside: vision tower, multi-token prediction."""
        return ("model.visual.", "mtp.") if self.language_half else ()


def check_model_sizes(cfg: ModelConfig, training: TrainingSpec) -> None:
    """`check_parallel` with the sizes of a job."""
    check_parallel(
        cfg,
        training.tensor_parallel,
        training.pipeline_parallel,
        training.expert_parallel,
        training.context_parallel,
    )


def check_parallel(cfg: ModelConfig, tp: int, pp: int, ep: int, cp: int = 1) -> None:
    """Refuse parallel sizes that the model cannot be cut into; UserError lists every problem."""
    linear = cfg.linear_attention
    problems = [
        f"{what} ({value}) is not divisible by {axis} ({size})"
        for what, value, axis, size in (
            ("num_attention_heads", cfg.num_heads, "tensorParallel", tp),
            ("num_key_value_heads", cfg.num_query_groups, "tensorParallel", tp),
            ("intermediate_size", cfg.ffn_hidden_size, "tensorParallel", tp),
            ("num_hidden_layers", cfg.num_layers, "pipelineParallel", pp),
            ("num_experts", cfg.num_experts, "expertParallel", ep),
            ("moe_intermediate_size", cfg.expert_ffn_hidden_size, "tensorParallel", tp if ep == 1 else 1),
            ("linear_num_key_heads", linear.key_heads if linear else 0, "tensorParallel", tp),
        )
        if value % size
    ]
    problems += _context_problems(cfg, tp, cp)
    if ep > 1 and not cfg.num_experts:
        problems.append(f"expertParallel ({ep}) needs a mixture-of-experts model, {cfg.model_type} has no experts")
    if problems:
        raise UserError("training parallel sizes do not fit the model: " + "; ".join(problems))


def check_context(model: ModelFacts, cp: int, obstacle: str | None) -> None:
    """Refuse ranks that cannot divide the rows of a model whose heads are whole on each; UserError says why.

    Args:
        model: the model.
        cp: ranks that divide a row.
        obstacle: what `hf_model.row_obstacle` found.
    """
    if cp > 1 and obstacle is not None:
        raise UserError(
            f"spec.training.contextParallel: ranks cannot divide the rows of this {model.model_type} model: it "
            f"{obstacle}; allowed: 1"
        )
    if problems := _context_problems(model, 1, cp):
        raise UserError("training parallel sizes do not fit the model: " + "; ".join(problems))


def _context_problems(model: ModelFacts, tp: int, cp: int) -> list[str]:
    linear = model.linear_attention
    heads = {"num_attention_heads": model.num_heads, "num_key_value_heads": model.num_query_groups}
    if linear is not None:
        heads |= {"linear_num_key_heads": linear.key_heads, "linear_num_value_heads": linear.value_heads}
    return [
        f"{what} / tensorParallel ({value} / {tp}) is not divisible by contextParallel ({cp})"
        for what, value in heads.items()
        if value % tp == 0 and value // tp % cp
    ]


def sequence_parallel(cfg: ModelConfig, tp: int) -> bool:
    """Whether the ranks of a tensor-parallel group divide the positions among them between the layers' matrices.

    Megatron's mixtures of experts ask for it: without, each of the ranks would send the same tokens to the experts.
    """
    return tp > 1 and cfg.num_experts > 0


def _from_dict(raw: Mapping[str, object], where: str) -> ModelConfig:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in SUPPORTED_MODEL_TYPES:
        why = f": {_MISSING[model_type]}" if isinstance(model_type, str) and model_type in _MISSING else ""
        allowed = ", ".join(SUPPORTED_MODEL_TYPES)
        raise UserError(f"{where}: model_type {model_type!r} is not supported{why}; use {allowed}")
    hf, text = hf_config(raw, where), language_config(raw, where)
    problems = _unsupported(text, hf) + (_unsupported_of_whole(raw, text, hf) if model_type == "qwen3_5" else [])
    if problems:
        raise UserError(f"{where}: " + "; ".join(problems))
    num_experts = hf.num_experts if model_type == "qwen3_moe" else 0
    return ModelConfig(
        **facts_of(raw, where, hf),
        ffn_hidden_size=hf.intermediate_size,
        norm_eps=hf.rms_norm_eps,
        rope_theta=float(hf.rope_parameters["rope_theta"]),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type != "qwen2",
        num_experts=num_experts,
        experts_per_token=hf.num_experts_per_tok if num_experts else 0,
        expert_ffn_hidden_size=hf.moe_intermediate_size if num_experts else 0,
        normalize_expert_weights=bool(hf.norm_topk_prob) if num_experts else True,
        rotary_fraction=float(hf.rope_parameters.get("partial_rotary_factor", 1.0)),
        output_gate=model_type == "qwen3_5",
        zero_centered_norms=model_type == "qwen3_5",
    )


def _unsupported_of_whole(raw: Mapping[str, object], text: Mapping[str, object], hf: HfConfig) -> list[str]:
    """Settings that vLLM and transformers read in different places, or that only one of them reads."""
    problems = []
    if raw.get("tie_word_embeddings", False) != text.get("tie_word_embeddings", False):
        problems.append("tie_word_embeddings must be the same beside text_config and in it")
    if raw.get("quantization_config"):
        problems.append("quantization_config is not supported; use an unquantized checkpoint")
    if text.get("attn_output_gate", True) is not True:
        problems.append("text_config.attn_output_gate must be true")
    if text.get("output_gate_type", "silu") not in ("silu", "swish"):
        problems.append(f"text_config.output_gate_type {text['output_gate_type']!r} is not supported; use 'swish'")
    if hf.linear_num_value_heads % hf.linear_num_key_heads:
        problems.append(
            f"linear_num_value_heads ({hf.linear_num_value_heads}) is not divisible by "
            f"linear_num_key_heads ({hf.linear_num_key_heads})"
        )
    return problems


def _unsupported(raw: Mapping[str, object], hf: HfConfig) -> list[str]:
    problems = []
    rope = hf.rope_parameters or {}
    if rope.get("rope_type", "default") != "default":
        problems.append(f"rope scaling {rope['rope_type']!r} is not supported; only the default rope is")
    theta = rope.get("rope_theta")
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
        problems.append(f"rope_theta {theta!r} is not supported; it must be a number above 0")
    hybrid = hasattr(hf, "linear_num_key_heads")
    if not hybrid and rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"partial_rotary_factor {rope['partial_rotary_factor']} is not supported; it must be 1.0")
    supported = (_LINEAR, _FULL) if hybrid else (_FULL,)
    layer_types = getattr(hf, "layer_types", None) or []
    if getattr(hf, "sliding_window", None) is not None or any(kind not in supported for kind in layer_types):
        problems.append("sliding-window attention is not supported; set use_sliding_window to false")
    if hf.hidden_act != "silu":
        problems.append(f"hidden_act {hf.hidden_act!r} is not supported; it must be 'silu'")
    if hf.attention_dropout:
        problems.append(f"attention_dropout {hf.attention_dropout} is not supported; it must be 0")
    if getattr(hf, "attention_bias", False):
        problems.append("attention_bias true is not supported")
    if raw.get("quantization_config"):
        problems.append("quantization_config is not supported; use an unquantized checkpoint")
    if hf.num_attention_heads % hf.num_key_value_heads:
        problems.append(
            f"num_attention_heads ({hf.num_attention_heads}) is not divisible by "
            f"num_key_value_heads ({hf.num_key_value_heads})"
        )
    return problems
