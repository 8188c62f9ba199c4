"""Tools that are Python: functions, and the public methods of a class that is made for each episode."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rljob_worker.confined.loading import load_named, text_of
from rljob_worker.data.turns import Schema
from rljob_worker.errors import UserError

_OWN = ("reset", "close")
"""Methods of a class that are no tools."""
_SHOWN = 80


class ToolError(Exception):
    """A tool says itself that a call failed: the policy reads why."""


@dataclass(frozen=True, slots=True)
class PythonTools:
    """Tools of one `FILE.py:NAME`.

    Attributes:
        path: it.
        schemas: of its tools, as a chat template gets them, by name.
        make: what holds the tools of an episode: an object of the class, or what holds the function.
    """

    path: str
    schemas: Mapping[str, Schema]
    make: Callable[[], object]

    def reset(self, held: object, row: Mapping[str, object]) -> None:
        """Let an object begin an episode; ValueError where it returns something."""
        reset = getattr(held, "reset", None)
        if callable(reset) and (said := _done(reset(**row))) is not None:
            raise ValueError(
                f"{self.path}: reset returned {_short(said)}, which no policy would see: the prompt is the row's; "
                "return nothing"
            )

    def call(self, held: object, name: str, arguments: Mapping[str, object]) -> str:
        """Call a tool; what it returned as text, ValueError where that cannot be."""
        return _text(_done(getattr(held, name)(**arguments)), name)


def python_tools(path: str, field: str, reach: str) -> PythonTools:
    """The tools at `package.module:NAME` or `FILE.py:NAME`.

    Args:
        path: where they are.
        field: of the manifest, which begins a message.
        reach: as of `load_named`.

    Raises:
        UserError: there are none, or one has no schema: it lacks hints or descriptions.
    """
    found = load_named(path, field, "function", reach)
    if inspect.isclass(found):
        return _methods(found, path, field)
    if not callable(found):
        raise UserError(f"{field}: {path!r} is not a function or class but {type(found).__name__}")
    name = path.rpartition(":")[2]
    holder = _Holder()
    setattr(holder, name, found)
    return PythonTools(path, {name: _schema(found, name, path, field)}, lambda: holder)


class _Holder:
    """Has a function as an attribute."""


def _methods(kind: type, path: str, field: str) -> PythonTools:
    try:
        made = kind()
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{field}: {path!r} is made for each episode as {kind.__name__}(), which fails: {type(error).__name__}: "
            f"{text_of(error)}"
        ) from None
    public = [name for name in dir(kind) if not name.startswith("_") and name not in _OWN]
    names = [name for name in public if callable(getattr(kind, name))]
    if not names:
        raise UserError(f"{field}: {path!r} has no public method beside reset and close: its methods are the tools")
    schemas = {name: _schema(getattr(made, name), name, path, field) for name in names}
    return PythonTools(path, schemas, kind)


def _schema(function: Callable[..., object], name: str, path: str, field: str) -> Schema:
    """A function's hints and docstring, as transformers reads them for chat templates."""
    # Its import takes seconds.
    from transformers.utils.chat_template_utils import get_json_schema

    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD and parameter.kind is not parameter.KEYWORD_ONLY:
            raise UserError(
                f"{field}: {path!r}, tool {name}: its parameter {parameter.name} is not one that is given by name"
            )
    try:
        schema: Schema = get_json_schema(function)
    except Exception as error:
        raise UserError(
            f"{field}: {path!r}, tool {name}: {error}; a tool needs a hint for each parameter (str, int, float, bool, "
            "list, dict, Literal) and a docstring that describes it and, under `Args:`, each of them"
        ) from None
    return {**schema, "function": {**schema["function"], "name": name}}


def _done(value: object) -> object:
    """The result of a function, async or not."""

    async def wait() -> object:
        return await value  # type: ignore[misc]

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


def _text(value: object, name: str) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"tool {name} returned {_short(value)}, which is no text and no JSON") from None


def _short(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= _SHOWN else text[: _SHOWN - 3] + '...'} ({type(value).__name__})"
