"""Names and shapes of the tensors of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rljob_worker.models.config import ModelConfig

HEAD = "lm_head.weight"
Manifest = list[tuple[str, tuple[int, ...]]]
"""Name and shape of each tensor, in the order of the model."""


@dataclass(frozen=True, slots=True)
class CheckpointTensors:
    """Tensors of a Hugging Face checkpoint of a model."""

    trained: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of each tensor that engines get, in the order of the model."""
    tied: tuple[tuple[str, str], ...] = ()
    """Names of tensors that it may have as well, and the one above that each of them is."""
    untrained: tuple[str, ...] = ()
    """Prefixes of the names of further tensors."""


def embedding(cfg: ModelConfig) -> str:
    """The token embedding, `[vocabulary, hidden]`."""
    return f"{_prefix(cfg)}embed_tokens.weight"


def final_norm(cfg: ModelConfig) -> str:
    """The norm before the head."""
    return f"{_prefix(cfg)}norm.weight"


def layer_prefix(cfg: ModelConfig, layer: int) -> str:
    """Prefix of the names of a layer's (0-based, over the whole model) tensors."""
    return f"{_prefix(cfg)}layers.{layer}."


def _prefix(cfg: ModelConfig) -> str:
    return "model.language_model." if cfg.language_half else "model."


def hf_manifest(cfg: ModelConfig) -> Manifest:
    """Name and shape of every tensor of the HF checkpoint, each module's tensors side by side, in model order."""
    hidden, vocab = cfg.hidden_size, cfg.vocab_size
    manifest: Manifest = [(embedding(cfg), (vocab, hidden))]
    for layer in range(cfg.num_layers):
        prefix = layer_prefix(cfg, layer)
        manifest += [(prefix + name, shape) for name, shape in layer_manifest(cfg, layer)]
    manifest.append((final_norm(cfg), (hidden,)))
    if cfg.value_head:
        weight, *bias = cfg.value_head
        manifest += [(weight, (1, hidden)), *((name, (1,)) for name in bias)]
    elif not cfg.tied_embeddings:
        manifest.append((HEAD, (vocab, hidden)))
    return manifest


def layer_manifest(cfg: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The same of one layer, without the `layer_prefix`."""
    hidden = cfg.hidden_size
    yield "input_layernorm.weight", (hidden,)
    if cfg.is_linear(layer):
        yield from _linear_attention_manifest(cfg)
    else:
        yield from _attention_manifest(cfg)
    yield "post_attention_layernorm.weight", (hidden,)
    if not cfg.is_moe(layer):
        yield from _mlp_manifest("mlp.", hidden, cfg.ffn_hidden_size)
        return
    yield "mlp.gate.weight", (cfg.num_experts, hidden)
    for expert in range(cfg.num_experts):
        yield from _mlp_manifest(f"mlp.experts.{expert}.", hidden, cfg.expert_ffn_hidden_size)


def _attention_manifest(cfg: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = cfg.num_heads * cfg.head_dim
    rows = {"q": width * (2 if cfg.output_gate else 1), "k": cfg.num_query_groups * cfg.head_dim}
    rows["v"] = rows["k"]
    for which, size in rows.items():
        yield f"self_attn.{which}_proj.weight", (size, cfg.hidden_size)
    if cfg.qkv_bias:
        for which, size in rows.items():
            yield f"self_attn.{which}_proj.bias", (size,)
    if cfg.qk_norm:
        yield "self_attn.q_norm.weight", (cfg.head_dim,)
        yield "self_attn.k_norm.weight", (cfg.head_dim,)
    yield "self_attn.o_proj.weight", (cfg.hidden_size, width)


def _linear_attention_manifest(cfg: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    sizes, hidden = cfg.linear_attention, cfg.hidden_size
    assert sizes is not None
    qkv = 2 * sizes.key_width + sizes.value_width
    yield "linear_attn.dt_bias", (sizes.value_heads,)
    yield "linear_attn.A_log", (sizes.value_heads,)
    yield "linear_attn.conv1d.weight", (qkv, 1, sizes.kernel_size)
    yield "linear_attn.in_proj_qkv.weight", (qkv, hidden)
    yield "linear_attn.in_proj_z.weight", (sizes.value_width, hidden)
    yield "linear_attn.in_proj_b.weight", (sizes.value_heads, hidden)
    yield "linear_attn.in_proj_a.weight", (sizes.value_heads, hidden)
    yield "linear_attn.norm.weight", (sizes.value_head_dim,)
    yield "linear_attn.out_proj.weight", (hidden, sizes.value_width)


def _mlp_manifest(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "gate_proj.weight", (width, hidden)
    yield prefix + "up_proj.weight", (width, hidden)
    yield prefix + "down_proj.weight", (hidden, width)
