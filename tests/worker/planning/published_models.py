"""Configs of published models, and how many parameters their authors count."""

from __future__ import annotations

from typing import Any

from rljob_worker.models.config import ModelConfig

_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960}
_QWEN3_5 = (
    {"model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288}
    | {"num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256}
    | {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
    | {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}
    | {"max_position_embeddings": 262144, "tie_word_embeddings": False}
    | {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}}
)
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "tie_word_embeddings": True}
    | {"num_attention_heads": 16, "num_key_value_heads": 8},
    "Qwen3-4B": _QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "tie_word_embeddings": True}
    | {"num_attention_heads": 32, "num_key_value_heads": 8},
    "Qwen3-8B": _QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "tie_word_embeddings": False}
    | {"num_attention_heads": 32, "num_key_value_heads": 8},
    "Qwen3-30B-A3B": _QWEN3
    | {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False, "norm_topk_prob": True}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "Qwen2.5-0.5B-Instruct": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
    }
    | {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
    | {"max_position_embeddings": 32768},
    "Qwen2.5-7B": {"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944}
    | {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False}
    | {"max_position_embeddings": 131072},
    "Qwen3-VL-8B-Instruct": {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": False,
        "text_config": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144}
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
            | {"mrope_section": [24, 20, 20]}
        },
        "vision_config": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
        | {"out_hidden_size": 4096, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
        | {"num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]},
    },
    # Its language half. The vision tower is neither trained nor counted.
    "Qwen3.5-9B": {"model_type": "qwen3_5", "vision_config": {}, "text_config": _QWEN3_5},
}
PARAMETERS = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
}
"""The sums of the safetensors on the hub."""


def published(name: str, **changed: Any) -> ModelConfig:
    """The config of a published model, or one that differs from it in some entries."""
    return ModelConfig.from_hf(CONFIGS[name] | changed)
