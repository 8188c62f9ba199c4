"""Tiny checkpoints of Qwen3.5, with the names of the published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEXT = {
    "model_type": "qwen3_5_text",
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "attn_output_gate": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}
VISION = {
    "model_type": "qwen3_5",
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 8,
    "num_position_embeddings": 16,
}
IMAGE_TOKENS = {
    f"{name}_token_id": 96 + index for index, name in enumerate(("image", "video", "vision_start", "vision_end"))
}


def config(vision: dict[str, Any] | None = None, **text: Any) -> dict[str, Any]:
    """`config.json` of a small model, with other values for the language half's fields."""
    return {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": TEXT | text,
        "vision_config": VISION | (vision or {}),
    } | IMAGE_TOKENS


def language_half(whole: dict[str, Any]) -> PreTrainedModel:
    """transformers' model of the language half, with norms away from their neutral values."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**whole["text_config"])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def write_folder(model: PreTrainedModel, whole: dict[str, Any], folder: Path) -> None:
    """A checkpoint with the tensors that training leaves out: some of the vision tower's and of the MTP head's."""
    dtype = next(model.parameters()).dtype
    tensors = {published_name(name): tensor.contiguous() for name, tensor in model.state_dict().items()}
    tensors |= {
        "model.visual.patch_embed.proj.weight": torch.randn(32, 3, 2, 8, 8).to(dtype),
        "model.visual.pos_embed.weight": torch.randn(16, 32).to(dtype),
        "mtp.fc.weight": torch.randn(64, 128),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(whole))


def published_name(name: str) -> str:
    """Published name of a tensor of the language half."""
    return name if name == "lm_head.weight" else name.replace("model.", "model.language_model.", 1)
