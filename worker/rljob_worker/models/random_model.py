"""Models with seeded random weights, for tests and demonstrations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from rljob_api.spec import RandomModel
from rljob_worker.errors import UserError
from rljob_worker.models.config import ModelConfig
from rljob_worker.models.hf_io import save_hf_folder
from rljob_worker.models.manifest import hf_manifest


def make_random_model(spec: RandomModel, tokenizer_folder: str | Path, out: Path) -> None:
    """Write a Hugging Face folder with weights drawn as transformers' Qwen initialisation does.

    Matrices are normal with standard deviation `initializer_range` (default 0.02), biases 0, norms 1; float32 unless
    the config names a `dtype`. The same spec gives the same bytes.
    `out` may be `tokenizer_folder`; what an interrupted call left there is replaced.

    Raises:
        UserError: a config that is not supported, or a vocabulary smaller than the tokenizer's.
    """
    config = _complete_config(spec.config, tokenizer_folder)
    cfg = ModelConfig.from_hf(config)
    if cfg.language_half:
        raise UserError(f"model.random.config: {cfg.model_type!r} is trained from a checkpoint alone: give model.path")
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(name)
    if dtype is None:
        raise UserError(f"model.random.config: dtype {name!r} is not supported; use 'float32' or 'bfloat16'")
    std = config.get("initializer_range", 0.02)
    if not isinstance(std, int | float):
        raise UserError(f"model.random.config: initializer_range is {std!r}, not a number")
    if not (out / "config.json").exists():
        # config.json is written last: without it, weights are what an interrupted call left behind.
        for leftover in (*out.glob("*.safetensors*"), *out.glob(".part-*")):
            leftover.unlink()
    save_hf_folder(out, _random_tensors(cfg, spec.seed, std, dtype), config, tokenizer_folder)


def _complete_config(given: Mapping[str, object], tokenizer_folder: str | Path) -> dict[str, object]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_folder), trust_remote_code=False)
    config: dict[str, object] = {"vocab_size": len(tokenizer), **given}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config.setdefault(key, getattr(tokenizer, key))
    size = config["vocab_size"]
    if isinstance(size, int) and size < len(tokenizer):
        raise UserError(f"model.random.config: vocab_size {size} is smaller than the tokenizer's {len(tokenizer)}")
    return config


def _random_tensors(cfg: ModelConfig, seed: int, std: float, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for name, shape in hf_manifest(cfg):
        if name.endswith("bias"):
            yield name, torch.zeros(shape, dtype=dtype)
        elif len(shape) == 1:
            yield name, torch.ones(shape, dtype=dtype)
        else:
            yield name, torch.empty(shape).normal_(std=std, generator=generator).to(dtype)
