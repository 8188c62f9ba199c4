"""The bounds of a manifest's engine arguments are those of the installed vLLM; its source is read, not imported."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_api.engine_arguments import KIND_OF, REFUSED, WORDS
from rljob_api.spec.rollout import RESERVED_ENGINE_ARGS
from rljob_worker.driver.preflight import engine_argument_names

_OF_KIND: dict[str, tuple[str, ...]] = {
    "a whole number": ("int",),
    "true or false": ("bool",),
    "a number": ("float", "int"),
    "a string": ("str", "Backend", "Policy", "Mode", "DType", "Algo", "Option", "Strategy"),
    "a list": ("list",),
    "a mapping": ("dict", "Config"),
}
_ALIASES = {
    "kv_cache_dtype": ("cache", "CacheDType"),
    "mamba_cache_dtype": ("cache", "MambaDType"),
    "mamba_ssm_cache_dtype": ("cache", "MambaDType"),
    "mamba_cache_mode": ("cache", "MambaCacheMode"),
    "prefix_caching_hash_algo": ("cache", "PrefixCachingHashAlgo"),
    "attention_backend": ("../v1/attention/backends/registry", "AttentionBackendEnum"),
    "config_format": ("../transformers_utils/config", "ConfigFormat"),
    "scheduling_policy": ("scheduler", "SchedulerPolicy"),
    "performance_mode": ("vllm", "PerformanceMode"),
}
"""Argument -> module of vllm.config, and the Literal or Enum with its values."""


def source(name: str) -> ast.Module:
    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    return ast.parse((Path(package.origin).parent / name).read_text(encoding="utf-8"))


def types() -> Iterator[tuple[str, str]]:
    for block in source("engine/arg_utils.py").body:
        for field in block.body if isinstance(block, ast.ClassDef) and block.name.endswith("EngineArgs") else ():
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                yield field.target.id, ast.unparse(field.annotation)


def literal(module: str, name: str) -> set[object]:
    for line in source(f"config/{module}.py").body:
        if isinstance(line, ast.ClassDef) and line.name == name:
            members = [one.targets[0] for one in line.body if isinstance(one, ast.Assign)]
            return {member.id for member in members if isinstance(member, ast.Name)}
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name) and line.targets[0].id == name:
            assert isinstance(line.value, ast.Subscript)
            words = ast.literal_eval(line.value.slice)
            return {*words} if isinstance(words, tuple) else {words}
    raise AssertionError(f"vllm.config.{module} has no {name}")


def test_all_of_them_are_vllms() -> None:
    named = {*KIND_OF, *REFUSED, *WORDS, *RESERVED_ENGINE_ARGS}
    assert named - engine_argument_names() == set()
    assert not REFUSED.keys() & (RESERVED_ENGINE_ARGS.keys() | KIND_OF.keys())
    assert WORDS.keys() <= KIND_OF.keys()


def test_the_kinds_are_vllms() -> None:
    found = dict(types())
    wrong = {name: found[name] for name, kind in KIND_OF.items() if not any(w in found[name] for w in _OF_KIND[kind])}
    assert wrong == {}


@pytest.mark.parametrize("name", sorted(WORDS))
def test_the_words_are_vllms(name: str) -> None:
    assert set(WORDS[name]) <= literal(*_ALIASES[name])
