"""Small models of each supported type, and the parallel layouts they are run in."""

from __future__ import annotations

from typing import Any

from support import qwen3_5

DENSE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MOE = DENSE | {
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
WORDS = ["<pad>", "<eos>", *(f"w{index}" for index in range(60))]
"""Words of a tokenizer."""
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": DENSE | {"model_type": "qwen2", "vocab_size": 96},
    "qwen3": DENSE | {"model_type": "qwen3", "vocab_size": 101, "head_dim": 32},
    "qwen3_tied": DENSE | {"model_type": "qwen3", "vocab_size": 101, "head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": MOE | {"model_type": "qwen3_moe", "vocab_size": 96},
    "qwen3_moe_mixed": MOE
    | {"model_type": "qwen3_moe", "vocab_size": 96, "norm_topk_prob": False, "mlp_only_layers": [1]},
    "qwen3_5": qwen3_5.config(),
}
"""101 is not divisible by 2: its tensor-parallel cut has a padding row."""
LAYOUTS = {"tp1": (1, 1, 1), "tp2": (2, 1, 1), "pp2": (1, 2, 1), "ep2": (1, 1, 2)}
"""Tensor, pipeline and expert parallel size."""
CASES = [
    *((model, "tp1") for model in CONFIGS),
    *((model, layout) for model in ("qwen2", "qwen3", "qwen3_tied", "qwen3_5") for layout in ("tp2", "pp2")),
    *((model, "ep2") for model in ("qwen3_moe", "qwen3_moe_mixed")),
    ("qwen3_moe", "pp2"),
    ("qwen3_moe_mixed", "tp2"),
]


def vocabulary(model: str) -> int:
    """Tokens of a model."""
    config = CONFIGS[model]
    size = config.get("text_config", config)["vocab_size"]
    assert isinstance(size, int)
    return size
