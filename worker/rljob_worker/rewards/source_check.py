"""Reward functions, judged by their source: nothing of it is run or imported."""

from __future__ import annotations

import ast
import difflib
import importlib.machinery
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from rljob_api import RLJobSpec
from rljob_api.rewards import function_file
from rljob_api.spec import RewardFunction, RewardSpec
from rljob_worker.data.sources import data_sources, evaluation_sources
from rljob_worker.errors import UserError
from rljob_worker.host.files import read_file
from rljob_worker.rewards.signatures import Signature, recognise

_COMPOUND = (ast.If, ast.Try, ast.With, ast.For, ast.While, ast.Match)


def check_sources(spec: RLJobSpec) -> None:
    """Refuse a reward file that is none or has no such function, and a module of which there is no package.

    Raises:
        UserError: naming the field, the file and the line.
    """
    places = ["", *(str(Path(path).expanduser()) for path in spec.environment.python_path)]
    for field, function in _functions(spec):
        path = str(function.python)
        named = function_file(path)
        if named is not None:
            _check_file(f"{field}.python", Path(named[0]), named[1])
        else:
            package = path.partition(":")[0].partition(".")[0]
            _check_package(f"{field}.python", package, places)


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


def _check_file(field: str, file: Path, function: str) -> None:
    try:
        tree = ast.parse(read_file(file.expanduser()), filename=str(file))
    except FileNotFoundError:
        raise UserError(f"{field}: {file} does not exist") from None
    except OSError as error:
        raise UserError(f"{field}: {file}: {error.strerror}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UserError(f"{field}: {file}{line}: no Python: {said}") from None
    names = set(_names(tree))
    if function not in names and "*" not in names:
        near = difflib.get_close_matches(function, names)
        raise UserError(
            f"{field}: {file} has no {function!r}" + (f"; did you mean {' or '.join(near)}?" if near else "")
        )


def _names(tree: ast.Module) -> Iterator[str]:
    """Names that a module has, `*` where its source alone does not tell."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield "*" if node.name == "__getattr__" else node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, _COMPOUND):
            yield "*"
        else:
            yield from (name.id for name in ast.walk(node) if isinstance(name, ast.Name))


def _check_package(field: str, package: str, places: list[str]) -> None:
    try:
        found = importlib.machinery.PathFinder.find_spec(package, places) or importlib.util.find_spec(package)
    except ValueError:
        # A module that is loaded and says nothing of where it comes from.
        return
    if found is None:
        raise UserError(
            f"{field}: there is no module {package!r}: it is neither installed nor in the folder where the job runs, "
            "nor in one of spec.environment.pythonPath"
        )
