"""`spec.model`: what the policy starts from."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from rljob_api.base import ApiModel, FreeForm, Name, PositiveInt, Seed, Text


class Hub(StrEnum):
    """Source of models and data sets."""

    HUGGING_FACE = "HuggingFace"
    MODEL_SCOPE = "ModelScope"


class TrainedTokenizer(ApiModel):
    """A small tokenizer trained at start-up on the job's own data (prompts and labels)."""

    vocab_size: PositiveInt = 512
    """Upper bound of the vocabulary, special tokens included."""
    kind: Literal["Word", "BPE"] = "Word"
    """`Word`: one token for each whitespace-separated word of the data; `BPE`: byte-pair encoding."""


class RandomModel(ApiModel):
    """A model with random weights, for tests and demonstrations."""

    config: FreeForm
    """Hugging Face config, with `model_type` (`qwen2`, `qwen3` or `qwen3_moe`; any with FSDP); `vocab_size` defaults to
    the tokenizer's."""
    seed: Seed = 0
    """Seed of the initial weights."""
    tokenizer: TrainedTokenizer = TrainedTokenizer()
    """The tokenizer to train for it."""


class ModelSpec(ApiModel):
    """The policy's starting point: exactly one of `path` and `random`."""

    path: Text | None = None
    """Checkpoint folder (config.json, safetensors, tokenizer) or hub id."""
    hub: Hub = Hub.HUGGING_FACE
    """Hub of a `path` that is not a local folder."""
    revision: Name | None = None
    """Branch, tag or commit on the hub; default: the hub's default branch."""
    random: RandomModel | None = None
    """Random weights instead of a checkpoint."""
    max_pixels: Annotated[int, Field(ge=784, le=2**26)] | None = None
    """Pixels of a picture: larger ones are made smaller; default: the image processor's."""
