"""Architectures that the installed vLLM generates with, read of its source: importing it takes seconds."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from rljob_worker.errors import UserError
from rljob_worker.models.facts import PICTURE_MODELS

_REGISTRY = ("model_executor", "models", "registry.py")
_TABLES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")


def check_served(raw: Mapping[str, object], where: str) -> None:
    """Refuse a config whose model the trainers and the engines would not both build; UserError names it.

    Args:
        raw: of a model that transformers has a class to be trained of.
        where: how errors call it.
    """
    trained = architecture_of(str(raw["model_type"]))
    given = raw.get("architectures")
    if isinstance(given, list) and given and trained not in given:
        raise UserError(f"{where}: architectures {given!r}: {raw['model_type']!r} is trained as {trained}")
    served = served_architectures()
    if served and trained not in served:
        raise UserError(
            f"{where}: model_type {raw['model_type']!r}: vLLM has no {trained}; use a model that transformers and "
            "vLLM both have, such as llama, mistral, gemma2 or qwen3"
        )


def architecture_of(model_type: str) -> str:
    """Name of transformers' class for a model type: of causal language modelling, or of text about pictures."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    names: Mapping[str, str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    of_pictures: Mapping[str, str] = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return of_pictures[model_type] if model_type in PICTURE_MODELS else names[model_type]


@cache
def served_architectures() -> frozenset[str]:
    """Names of the classes that vLLM has for models that write text; empty without vLLM."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return frozenset()
    source = Path(package.origin).parent.joinpath(*_REGISTRY).read_text(encoding="utf-8")
    return frozenset(
        key.value
        for block in ast.parse(source).body
        if isinstance(block, ast.Assign) and isinstance(block.value, ast.Dict)
        if any(isinstance(target, ast.Name) and target.id in _TABLES for target in block.targets)
        for key in block.value.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    )
