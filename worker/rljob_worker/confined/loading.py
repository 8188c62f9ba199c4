"""Code of users, found and imported inside the processes that run it."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rljob_api.rewards import function_file
from rljob_worker.errors import UserError

LONGEST_TEXT = 2000


def load_named(path: str, field: str, kind: str, reach: str) -> Any:
    """The object at `package.module:NAME` or `FILE.py:NAME`.

    Args:
        path: where it is.
        field: of the manifest, which begins a message.
        kind: what it is to be, in a word.
        reach: what is said beside an error of a file that confined code does not reach.

    Raises:
        UserError: it does not import or is not there.
    """
    module_name, _, name = path.rpartition(":")
    is_module = all(part.isidentifier() for part in module_name.split("."))
    if not name.isidentifier() or not (is_module or function_file(path)):
        raise UserError(f"{field}: {path!r} is of neither form: package.module:{kind}, FILE.py:{kind}")
    try:
        module = _import_file(Path(module_name), field) if function_file(path) else importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{field}: {path!r}: module {module_name!r} does not import: {type(error).__name__}: {text_of(error)}"
            f"{out_of_reach(error, reach)}"
        ) from error
    try:
        found = getattr(module, name, None)
    except (Exception, SystemExit) as error:
        # A module's own `__getattr__`.
        what = f"module {module_name!r} fails when it is asked for {name!r}"
        raise UserError(f"{field}: {path!r}: {what}: {type(error).__name__}: {text_of(error)}") from error
    if found is None:
        near = difflib.get_close_matches(name, [n for n in dir(module) if not n.startswith("__")])
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"{field}: {path!r}: module {module_name!r} ({module.__file__}) has no {name!r}{hint}")
    return found


def _import_file(file: Path, field: str) -> ModuleType:
    """The module in a file, which may import what lies beside it, as when Python runs it."""
    # A name of its own: a file may be called like a module of the standard library.
    name = f"{field.partition('.')[0]}_file_{file.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(file):
        # Several names of one file share what it holds.
        return known
    found = importlib.util.spec_from_file_location(name, file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    sys.path.insert(0, str(file.parent))
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def text_of(error: BaseException) -> str:
    """Text of an exception, at most `LONGEST_TEXT` characters of it; a user's own may fail at saying it."""
    try:
        text = str(error)
    except BaseException as failed:
        return f"(its text fails: {type(failed).__name__})"
    text = whole_characters(text)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}... ({len(text)} characters)"


def whole_characters(text: str) -> str:
    """The text with halves of characters (`\\ud800`) as escapes: no file and no record holds them."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def out_of_reach(error: BaseException, reach: str) -> str:
    """`reach` beside an error of a file that confined code does not reach; empty for others."""
    return f"; {reach}" if isinstance(error, PermissionError) and error.filename is not None else ""
