"""Tiny random configurations of architectures that transformers trains and vLLM serves, as `config.json` has them."""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA = {"query_pre_attn_scalar": 32, "sliding_window": 16}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": BASE | {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": BASE | {"model_type": "qwen3", "tie_word_embeddings": False},
    "qwen3_tied": BASE | {"model_type": "qwen3", "tie_word_embeddings": True},
    "llama": BASE | {"model_type": "llama", "tie_word_embeddings": False},
    "llama_tied": BASE | {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": BASE | {"model_type": "mistral", "tie_word_embeddings": False},
    "gemma2": BASE | {"model_type": "gemma2"} | _GEMMA,
    "gemma3_text": BASE | {"model_type": "gemma3_text"} | _GEMMA,
    "olmo2": BASE | {"model_type": "olmo2", "tie_word_embeddings": False},
    "glm4": BASE | {"model_type": "glm4", "tie_word_embeddings": False},
    "mixtral": BASE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": BASE | _EXPERTS | {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "tie_word_embeddings": False},
}
