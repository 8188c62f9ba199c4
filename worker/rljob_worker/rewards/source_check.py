"""Reward functions, judged by their source: nothing of it is run or imported."""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from rljob_api import RLJobSpec
from rljob_api.rewards import function_file
from rljob_api.spec import RewardFunction, RewardSpec
from rljob_worker.confined.named_source import check_named
from rljob_worker.data.sources import data_sources, evaluation_sources
from rljob_worker.errors import UserError
from rljob_worker.host.files import read_file
from rljob_worker.host.paths import home_expanded
from rljob_worker.rewards.functions import RESERVED
from rljob_worker.rewards.group_filter_process import check_call
from rljob_worker.rewards.parameters import Parameters, written_parameters
from rljob_worker.rewards.signatures import GIVEN, Signature, recognise

FILTER_FIELD = "spec.rollout.oversampling.function"


def check_sources(spec: RLJobSpec, *, on_this_machine: bool = True) -> None:
    """Refuse a reward file that is none or has no such function, and a module of which there is no package.

    Args:
        spec: the job's.
        on_this_machine: its rewards run here; otherwise what is not here may be where they do.

    Raises:
        UserError: naming the field, the file and the line.
    """
    named_functions: list[tuple[str, str, RewardFunction | None]] = [
        (f"{field}.python", str(function.python), function) for field, function in _functions(spec)
    ]
    if spec.rollout.oversampling is not None and spec.rollout.oversampling.function is not None:
        named_functions.append((FILTER_FIELD, spec.rollout.oversampling.function, None))
    for field, path, function in named_functions:
        named = function_file(path)
        if on_this_machine or (named is not None and os.path.lexists(Path(named[0]).expanduser())):
            check_named(field, path, package_places(spec))
            if function is not None:
                _check_args(field.removesuffix(".python"), function)


def package_places(spec: RLJobSpec) -> list[str]:
    """Folders in which the job's processes find packages, beside what is installed; UserError for an unknown home."""
    places = [""]
    for number, path in enumerate(spec.environment.python_path):
        try:
            places.append(str(home_expanded(path)))
        except OSError as error:
            raise UserError(f"spec.environment.pythonPath[{number}]: {path}: {error.strerror}") from None
    return places


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
        called = f"{path} is called as {_recognised(field, function, found)} calls it"
        told.append(f"{field}.python: {called}: its parameters are {', '.join(found.names)}")
    return told


def _recognised(field: str, function: RewardFunction, found: Parameters) -> Signature:
    try:
        return recognise(function.signature, found.names, found.takes_any, function.batch, str(function.python))
    except UserError as error:
        raise UserError(f"{field}{str(error).removeprefix('reward')}") from None


def check_columns(field: str, function: RewardFunction, columns: Collection[str], keys: Collection[str]) -> None:
    """Refuse a function of a file that asks for what a row does not have. Raises UserError.

    Args:
        field: the function's place in the manifest.
        function: it.
        columns: of the rows that it scores, without those of prompt and label.
        keys: the columns of prompt and label.
    """
    found = None if function.batch else _parameters(str(function.python))
    if found is None:
        return
    signature = _recognised(field, function, found)
    if signature == Signature.SLIME:
        return
    given, aside = {*RESERVED, *columns, *function.args}, " (the column of labelKey comes as label)"
    if signature != Signature.RLJOB:
        of_rows = {*columns, *keys} if signature == Signature.TRL else set()
        given, aside = {*GIVEN[signature], *of_rows, *function.args}, ""
    for name in found.required:
        if name not in given:
            raise UserError(
                f"{field}.python: {function.python!r} asks for {name!r}, which is neither a column of the data nor in "
                f"reward.args; there are {', '.join(sorted(given))}{aside}"
            )


def check_filter(spec: RLJobSpec, columns: Mapping[str, frozenset[str] | None]) -> None:
    """Refuse a group filter in a file that cannot be called, or asks for what no row has. Raises UserError.

    Args:
        spec: the job's.
        columns: by a source's place, those that a reward is given beside prompt and label; None: not known.
    """
    oversampling = spec.rollout.oversampling
    path = None if oversampling is None else oversampling.function
    found = None if path is None else _parameters(path)
    if path is None or found is None:
        return
    known = [there for field, _ in data_sources(spec) if (there := columns.get(field)) is not None]
    try:
        check_call(path, found, frozenset.intersection(*known) if known else None)
    except UserError as error:
        raise UserError(f"spec.{error}") from None


def _check_args(field: str, function: RewardFunction) -> None:
    """Refuse arguments that a function of a file does not take, and one that takes none by name."""
    found = _parameters(str(function.python)) if function.signature == Signature.RLJOB else None
    if found is None:
        return
    if not function.batch and (by_place := [name for name in found.by_place if name in found.required]):
        raise UserError(
            f"{field}.python: {function.python!r} takes {by_place[0]!r} by position alone; arguments are given by name"
        )
    if found.takes_any:
        return
    for name in function.args:
        if name not in found.names:
            near = difflib.get_close_matches(name, found.names)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{field}.args.{name}: {function.python!r} has no such parameter{hint}")


def _parameters(path: str) -> Parameters | None:
    """A function's parameters; None where its source does not tell."""
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
    return written_parameters(found[-1])


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
