"""Facts about a model for any training backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict, cast

from rljob_api.rules.model_config import size_findings
from rljob_worker.errors import UserError
from rljob_worker.models.json_files import read_json_object

PICTURE_MODELS = ("qwen2_5_vl", "qwen3_vl")
"""Model types that FSDP trains with pictures: their towers, positions and placeholders are known."""
PICTURE_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""Files that say how pictures become a model's input, where it takes any."""
_MOST_LABELS = 1_000_000
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names that families give the number of a layer's routed experts."""


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Shape of a gated delta net (arXiv 2412.06464): a layer whose attention is a state of fixed size."""

    key_heads: int
    value_heads: int
    """A multiple of `key_heads`: so many of them share a query and a key."""
    key_head_dim: int
    value_head_dim: int
    kernel_size: int
    """Positions that the causal convolution of queries, keys and values sees."""

    @property
    def key_width(self) -> int:
        """Total width of the keys; also that of the queries."""
        return self.key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Total width of the values; also that of their gates."""
        return self.value_heads * self.value_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Shape of a decoder-only model, or of the language half of one that sees; sizes are in elements."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_query_groups: int
    """Key/value heads."""
    head_dim: int
    max_position_embeddings: int
    tied_embeddings: bool
    moe_layers: tuple[bool, ...]
    """For each layer, whether it is a mixture of experts."""
    linear_attention: LinearAttention | None
    """In a model some of whose layers have such."""
    linear_layers: tuple[bool, ...]
    """For each layer, whether its attention is linear; empty in a model without such."""
    mlp_width: int
    """The most numbers of a token between an MLP's matrices, those of all its experts together."""
    language_half: bool
    """Whether it is the language half of a model that sees."""

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, object]) -> ModelFacts:
        """Read the config of a checkpoint folder, or a config given as a dict.

        Raises:
            UserError: no readable config, or one without a size that is asked for; names it.
        """
        raw, where = hf_source(source)
        hf = hf_config(raw, where)
        missing = [name for name in _NEEDED if getattr(hf, name, None) is None]
        if missing:
            raise UserError(f"{where}: has no {', '.join(missing)}; it must be the config of a decoder-only model")
        return ModelFacts(**facts_of(raw, where, hf))

    def is_linear(self, layer: int) -> bool:
        """Whether a layer's (0-based, over the whole model) attention is linear."""
        return self.linear_attention is not None and self.linear_layers[layer]


_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


class ModelValues(TypedDict):
    """The fields of `ModelFacts`."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_query_groups: int
    head_dim: int
    max_position_embeddings: int
    tied_embeddings: bool
    moe_layers: tuple[bool, ...]
    linear_attention: LinearAttention | None
    linear_layers: tuple[bool, ...]
    mlp_width: int
    language_half: bool


def hf_source(source: str | Path | Mapping[str, object]) -> tuple[Mapping[str, object], str]:
    """A config, read where it is in a folder, and how errors call it."""
    if isinstance(source, Mapping):
        return source, "model config"
    return read_hf_config(source), str(Path(source) / "config.json")


def read_hf_config(folder: str | Path) -> dict[str, object]:
    """`config.json` of a checkpoint folder; UserError when it is absent or not a JSON object."""
    path = Path(folder) / "config.json"
    try:
        return read_json_object(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{path}: no such file; a model folder needs config.json, *.safetensors and tokenizer files"
        ) from None


class HfConfig(Protocol):
    """Fields that are read of transformers' configurations of models, whichever of them has the field."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, float | str]
    max_position_embeddings: int
    tie_word_embeddings: bool
    hidden_act: str
    attention_dropout: float
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    mlp_only_layers: Sequence[int]
    decoder_sparse_step: int
    layer_types: Sequence[str]
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int


class HfWholeConfig(Protocol):
    """transformers' configuration of a model that sees."""

    text_config: HfConfig


def sees(raw: Mapping[str, object], where: str) -> bool:
    """Whether a config is of a model that sees, whose language half has a config in it.

    Raises:
        UserError: transformers has no such model.
    """
    from transformers import CONFIG_MAPPING

    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UserError(f"{where}: model_type {model_type!r} is no model that transformers has")
    return "text_config" in CONFIG_MAPPING[model_type].sub_configs


def language_config(raw: Mapping[str, object], where: str) -> Mapping[str, object]:
    """The part of a config that is the decoder's; UserError where that is no object."""
    if not sees(raw, where):
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise UserError(f"{where}: text_config must be an object, the language half's config; got {text!r}")
    kind = text.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise UserError(f"{where}: text_config.model_type must be the name of a model; got {kind!r:.80}")
    return text


def hf_config(raw: Mapping[str, object], where: str) -> HfConfig:
    """The configuration that transformers makes of a config, the language half's where the model sees.

    Raises:
        UserError: a size without end, or something that transformers refuses.
    """
    whole = whole_config(raw, where)
    return cast("HfWholeConfig", whole).text_config if sees(raw, where) else cast("HfConfig", whole)


def whole_config(raw: Mapping[str, object], where: str) -> HfConfig | HfWholeConfig:
    """The configuration that transformers makes of a config; errors as of `hf_config`."""
    from transformers import AutoConfig

    sizes = {key: value for key, value in language_config(raw, where).items() if value is not None}
    for finding in size_findings(sizes):
        key = str(finding.path[0])
        raise UserError(f"{where}: {key} {sizes[key]!r} {finding.wrong}; {finding.allowed}")
    labels = raw.get("num_labels")
    if isinstance(labels, int) and labels > _MOST_LABELS:
        # transformers makes a name for each.
        raise UserError(f"{where}: num_labels {labels} is too large; at most {_MOST_LABELS}, or leave it out")
    try:
        make: Callable[..., HfConfig | HfWholeConfig] = AutoConfig.for_model
        return make(**raw)
    except Exception as error:  # transformers' own validation raises many types
        raise UserError(f"{where}: {error}") from error


def facts_of(raw: Mapping[str, object], where: str, hf: HfConfig) -> ModelValues:
    """The fields of `ModelFacts` that a config gives."""
    return ModelValues(
        model_type=str(raw["model_type"]),
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_query_groups=getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        max_position_embeddings=hf.max_position_embeddings,
        # Of a model that sees, it may be the whole's alone.
        tied_embeddings=bool(getattr(hf, "tie_word_embeddings", raw.get("tie_word_embeddings"))),
        moe_layers=_moe_layers(hf),
        linear_attention=_linear_attention(hf),
        linear_layers=_linear_layers(hf),
        mlp_width=_mlp_width(hf),
        language_half=sees(raw, where),
    )


def _linear_attention(hf: HfConfig) -> LinearAttention | None:
    if not hasattr(hf, "linear_num_key_heads"):
        return None
    return LinearAttention(
        key_heads=hf.linear_num_key_heads,
        value_heads=hf.linear_num_value_heads,
        key_head_dim=hf.linear_key_head_dim,
        value_head_dim=hf.linear_value_head_dim,
        kernel_size=hf.linear_conv_kernel_dim,
    )


def _linear_layers(hf: HfConfig) -> tuple[bool, ...]:
    if not hasattr(hf, "linear_num_key_heads"):
        return ()
    return tuple(kind == "linear_attention" for kind in hf.layer_types)


def _mlp_width(hf: HfConfig) -> int:
    dense = getattr(hf, "intermediate_size", None) or 4 * hf.hidden_size
    of_expert = getattr(hf, "moe_intermediate_size", None) or dense
    chosen = getattr(hf, "num_experts_per_tok", None) or 0
    return max(dense, chosen * of_expert)


def _moe_layers(hf: HfConfig) -> tuple[bool, ...]:
    """The rules of transformers' Qwen3MoeDecoderLayer and DeepseekV3DecoderLayer."""
    layers = range(hf.num_hidden_layers)
    if not any(getattr(hf, name, None) for name in _EXPERT_COUNTS):
        return (False,) * len(layers)
    dense, every = getattr(hf, "mlp_only_layers", None) or (), getattr(hf, "decoder_sparse_step", None) or 1
    first = getattr(hf, "first_k_dense_replace", None) or 0
    return tuple(layer >= first and layer not in dense and (layer + 1) % every == 0 for layer in layers)
