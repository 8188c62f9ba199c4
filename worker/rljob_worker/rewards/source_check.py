"""Reward functions, judged by their source: nothing of it is run or imported."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from rljob_api import RLJobSpec
from rljob_api.rewards import function_file
from rljob_api.spec import RewardFunction, RewardSpec
from rljob_worker.confined.named_source import check_named
from rljob_worker.data.sources import data_sources, evaluation_sources
from rljob_worker.errors import UserError
from rljob_worker.host.files import read_file
from rljob_worker.rewards.signatures import Signature, recognise


def check_sources(spec: RLJobSpec, *, on_this_machine: bool = True) -> None:
    """Refuse a reward file that is none or has no such function, and a module of which there is no package.

    Args:
        spec: the job's.
        on_this_machine: its rewards run here; otherwise what is not here may be where they do.

    Raises:
        UserError: naming the field, the file and the line.
    """
    for field, function in _functions(spec):
        path = str(function.python)
        named = function_file(path)
        if on_this_machine or (named is not None and os.path.lexists(Path(named[0]).expanduser())):
            check_named(f"{field}.python", path, package_places(spec))


def package_places(spec: RLJobSpec) -> list[str]:
    """Folders in which the job's processes find packages, beside what is installed."""
    return ["", *(str(Path(path).expanduser()) for path in spec.environment.python_path)]


def told_signatures(spec: RLJobSpec) -> list[str]:
    """A sentence for each function of another framework: how it is called.

    Raises:
        UserError: `signature: Auto` does not tell by the parameters of a function in a file of this machine.
    """
    told = []
    for field, function in _functions(spec):
        wanted, path = function.signature, str(function.python)
        if wanted == Signature.RLJOB:
            continue
        if wanted != "Auto":
            told.append(f"{field}.python: {path} is called as {wanted} calls it")
            continue
        found = _parameters(path)
        if found is None:
            told.append(f"{field}.python: how {path} is called shows when the job or rljob score imports it")
            continue
        names, takes_any = found
        try:
            signature = recognise(wanted, names, takes_any, function.batch, path)
        except UserError as error:
            raise UserError(f"{field}{str(error).removeprefix('reward')}") from None
        told.append(f"{field}.python: {path} is called as {signature} calls it: its parameters are {', '.join(names)}")
    return told


def _parameters(path: str) -> tuple[list[str], bool] | None:
    """Names of a function's parameters and whether it has `**kwargs`; None where its source does not tell."""
    named = function_file(path)
    if named is None:
        return None
    try:
        tree = ast.parse(read_file(Path(named[0]).expanduser()))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = [
        node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == named[1]
    ]
    # A decorator may make another function of it.
    if not found or found[-1].decorator_list:
        return None
    args = found[-1].args
    return [one.arg for one in (*args.posonlyargs, *args.args, *args.kwonlyargs)], args.kwarg is not None


def _functions(spec: RLJobSpec) -> Iterator[tuple[str, RewardFunction]]:
    rewards: list[tuple[str, RewardSpec | None]] = [("spec.reward", spec.reward)]
    rewards += [(f"{field}.reward", source.reward) for field, source in data_sources(spec) + evaluation_sources(spec)]
    for field, reward in rewards:
        if reward is None:
            continue
        if reward.python is not None:
            yield field, reward
        for index, part in enumerate(reward.parts or []):
            if part.python is not None:
                yield f"{field}.parts[{index}]", part
