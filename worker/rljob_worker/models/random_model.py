"""Models with seeded random weights, for tests and demonstrations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rljob_api.spec import RandomModel
from rljob_worker.errors import UserError
from rljob_worker.models.checkpoint_views import checkpoint_views
from rljob_worker.models.config import SUPPORTED_MODEL_TYPES, ModelConfig
from rljob_worker.models.facts import PICTURE_MODELS, whole_config
from rljob_worker.models.hf_io import save_hf_folder
from rljob_worker.models.hf_model import build_hf_model, check_settings
from rljob_worker.models.manifest import hf_manifest
from rljob_worker.models.pictures import PICTURE_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PICTURE_IDS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
"""Fields of a config, for each of `PICTURE_TOKENS`."""


def make_random_model(spec: RandomModel, tokenizer_folder: str | Path, out: Path) -> None:
    """Write a Hugging Face folder with weights drawn as transformers' initialisation of the model does.

    Of what Megatron trains, matrices are normal with standard deviation `initializer_range` (default 0.02), biases 0,
    norms 1; any other model draws its own. float32 unless the config names a `dtype`. The same spec gives the same
    bytes, whichever backend trains it.
    `out` may be `tokenizer_folder`; what an interrupted call left there is replaced.

    Raises:
        UserError: a config that is not supported, or a vocabulary smaller than the tokenizer's.
    """
    config = _complete_config(spec.config, tokenizer_folder)
    own = config.get("model_type") in SUPPORTED_MODEL_TYPES
    if own and ModelConfig.from_hf(config).language_half:
        kind = config["model_type"]
        raise UserError(f"model.random.config: {kind!r} is trained from a checkpoint alone: give model.path")
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
    if own:
        tensors = _random_tensors(ModelConfig.from_hf(config), spec.seed, std, dtype)
    else:
        tensors = _drawn_by_transformers(config, spec.seed, dtype)
    save_hf_folder(out, tensors, config, tokenizer_folder)


def _complete_config(given: Mapping[str, object], tokenizer_folder: str | Path) -> dict[str, object]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_folder), trust_remote_code=False)
    config: dict[str, object] = {"vocab_size": len(tokenizer), **given}
    if given.get("model_type") in PICTURE_MODELS:
        return _seeing_config(given, tokenizer)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config.setdefault(key, getattr(tokenizer, key))
    size = config["vocab_size"]
    if isinstance(size, int) and size < len(tokenizer):
        raise UserError(f"model.random.config: vocab_size {size} is smaller than the tokenizer's {len(tokenizer)}")
    return config


def _seeing_config(given: Mapping[str, object], tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """With the tokenizer's tokens: the text's in the text's config, those of pictures beside it."""
    text = given.get("text_config")
    if not isinstance(text, Mapping):
        raise UserError("model.random.config.text_config: is missing: the sizes of the language half")
    vocabulary = tokenizer.get_vocab()
    own = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = {"vocab_size": len(tokenizer), **own, **text}
    size = text["vocab_size"]
    if not isinstance(size, int) or size < len(tokenizer):
        raise UserError(f"model.random.config.text_config: vocab_size {size!r}; the tokenizer has {len(tokenizer)}")
    tokens = dict(zip(_PICTURE_IDS, (vocabulary[token] for token in PICTURE_TOKENS), strict=True))
    return {**given, **tokens, "text_config": text}


def _random_tensors(cfg: ModelConfig, seed: int, std: float, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for name, shape in hf_manifest(cfg):
        if name.endswith("bias"):
            yield name, torch.zeros(shape, dtype=dtype)
        elif len(shape) == 1:
            yield name, torch.ones(shape, dtype=dtype)
        else:
            yield name, torch.empty(shape).normal_(std=std, generator=generator).to(dtype)


def _drawn_by_transformers(
    config: Mapping[str, object], seed: int, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint of transformers' own random weights of any model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    check_settings(config, "model.random.config")
    seeing = config["model_type"] in PICTURE_MODELS
    made = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    views = checkpoint_views(build_hf_model(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        whole = whole_config(config, "model.random.config")
        model = made.from_config(whole, dtype=torch.float32, trust_remote_code=False)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for view in views:
        yield view.name, view.of(parameters[view.parameter]).to(dtype, copy=True)
