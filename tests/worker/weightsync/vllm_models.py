"""Tiny Hugging Face folders with random weights, two of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support import qwen3_5


def make_model(
    kind: str, seed: int, folder: Path, *, vocab_size: int = 512, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a `tied`, `untied`, `qwen2` (untied), `moe` (untied), `moe_tied` or `hybrid` (Qwen3.5, untied) model."""
    from transformers import (
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    base: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 1,
        "bos_token_id": None,
        "tie_word_embeddings": kind in ("tied", "moe_tied"),
    }
    torch.manual_seed(seed)
    if kind == "hybrid":
        linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        linear |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
        kinds = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 32}
        config = qwen3_5.config({"out_hidden_size": 128}, **base | linear | kinds)
        qwen3_5.write_folder(qwen3_5.language_half(config).to(dtype), config, folder)
        return
    model: Any
    if kind.startswith("moe"):
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**base, **experts, head_dim=32, decoder_sparse_step=1))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**base))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**base, head_dim=32))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.to(dtype).save_pretrained(folder)
