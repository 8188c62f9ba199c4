"""Targets of `FILE.py:NAME` and `package.module:NAME`, judged by source: nothing of it is run or imported."""

from __future__ import annotations

import ast
import difflib
import importlib.machinery
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from rljob_api.rewards import function_file
from rljob_worker.errors import UserError
from rljob_worker.host.files import read_file

_VALUES = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_COMPOUND = (ast.If, ast.Try, ast.With, ast.For, ast.While, ast.Match)


def check_named(field: str, path: str, places: Sequence[str]) -> None:
    """Refuse a file that is none or has no such name, and a module of which there is no package.

    Args:
        field: of the manifest, which begins a message.
        path: what it has.
        places: folders in which packages are looked for, beside those of this process.

    Raises:
        UserError: naming the field, the file and the line.
    """
    named = function_file(path)
    if named is not None:
        _check_file(field, Path(named[0]), named[1])
    else:
        check_package(field, path.partition(":")[0].partition(".")[0], places)


def check_package(field: str, package: str, places: Sequence[str]) -> None:
    """Refuse a package that is nowhere; UserError."""
    try:
        found = importlib.machinery.PathFinder.find_spec(package, list(places)) or importlib.util.find_spec(package)
    except ValueError:
        # A module that is loaded and says nothing of where it comes from.
        return
    if found is None:
        raise UserError(
            f"{field}: there is no module {package!r}: it is neither installed nor in the folder where the job runs, "
            "nor in one of spec.environment.pythonPath"
        )


def _check_file(field: str, file: Path, name: str) -> None:
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
    if (value := _value(tree, name)) is not None:
        raise UserError(f"{field}: {file}, line {value.lineno}: {name!r} is no function or class, but a value")
    names = set(_names(tree))
    if name not in names and "*" not in names:
        near = difflib.get_close_matches(name, names)
        raise UserError(f"{field}: {file} has no {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""))


def _value(tree: ast.Module, name: str) -> ast.expr | None:
    """Last value that a module's own lines give a name, where they show that it cannot be called."""
    found: ast.expr | None = None
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(part, ast.Name) and part.id == name for one in targets for part in ast.walk(one)):
                alone = all(isinstance(target, ast.Name) for target in targets)
                found = node.value if alone and isinstance(node.value, _VALUES) else None
        elif name in _names(ast.Module([node], [])) or isinstance(node, _COMPOUND):
            found = None
    return found


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
