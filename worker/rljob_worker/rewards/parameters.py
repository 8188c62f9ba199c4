"""Parameters of users' functions. Imported by their processes: keep it light."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a function."""

    names: list[str]
    """Without `*args` and `**kwargs`."""
    required: list[str]
    """Names of those without a default."""
    by_place: list[str]
    """Names of those that are given by position alone."""
    takes_any: bool
    """Whether it has `**kwargs`."""
    is_async: bool = False
    """Whether calling it gives a coroutine."""


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: an async function, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """Parameters of an imported function. Raises TypeError or ValueError where it does not tell them."""
    found = inspect.signature(function).parameters
    named = {name: one for name, one in found.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    return Parameters(
        [*named],
        [name for name, one in named.items() if one.default is one.empty],
        [name for name, one in named.items() if one.kind is one.POSITIONAL_ONLY],
        any(one.kind is one.VAR_KEYWORD for one in found.values()),
        is_async(function),
    )


def written_parameters(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> Parameters:
    """Parameters of a function by its source."""
    args = definition.args
    plain = [one.arg for one in (*args.posonlyargs, *args.args)]
    required = plain[: len(plain) - len(args.defaults)]
    required += [one.arg for one, default in zip(args.kwonlyargs, args.kw_defaults) if default is None]
    return Parameters(
        [*plain, *(one.arg for one in args.kwonlyargs)],
        required,
        [one.arg for one in args.posonlyargs],
        args.kwarg is not None,
        isinstance(definition, ast.AsyncFunctionDef),
    )
