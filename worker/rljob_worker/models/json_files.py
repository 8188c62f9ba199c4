"""The small JSON files of a model folder: each must be whole, in UTF-8, and of the kind that its readers expect."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rljob_worker.errors import UserError
from rljob_worker.host.encodings import not_text, without_mark
from rljob_worker.host.files import read_file
from rljob_worker.models.token_files import check_numbers, check_tokens

_HEAD = 64
_OBJECTS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "tokenizer.json",
    "chat_template.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
"""Files that hold an object, where a folder has them; a safetensors index is judged with the tensors that it names."""
_TEXTS = ("chat_template.jinja", "merges.txt", "vocab.txt")


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        UserError: it cannot be read, is no text in UTF-8, no whole JSON, or something else than an object.
    """
    content = _content(path)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        cut = ": the file is cut off" if _is_cut_off(error, content) else ""
        raise UserError(f"{path}: not valid JSON{cut}: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


def check_json_files(folder: Path) -> None:
    """Refuse a model folder with a small file that its readers would fail at, each with a traceback of its own.

    Raises:
        UserError: names the file and what is wrong.
    """
    values: dict[str, dict[str, Any]] = {}
    for name in (*_OBJECTS, *_TEXTS):
        path = folder / name
        if not os.path.lexists(path):
            continue
        try:
            if name in _TEXTS:
                _content(path)
                continue
            values[name] = read_json_object(path)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{path}: cannot be read: it is a link to nothing") from None
        if name in _CHECKS:
            _CHECKS[name](values[name], path)
    check_tokens(values, folder)


def check_token_numbers(folder: Path, called: str | None = None) -> None:
    """Refuse a tokenizer's folder, of which no config tells the size, with a token's number that no library ends with.

    Args:
        folder: with its files; those that cannot be read are left to what loads them.
        called: where they were copied from, for the message.

    Raises:
        UserError: naming the file and the token.
    """
    values = dict[str, dict[str, Any]]()
    for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "vocab.json"):
        with suppress(OSError, UserError):
            values[name] = read_json_object(folder / name)
    check_numbers(values, folder if called is None else Path(called))


def _content(path: Path) -> str:
    try:
        content = read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if not content.strip():
        raise UserError(f"{path}: not valid JSON: the file is empty" if path.suffix == ".json" else f"{path}: is empty")
    if what := not_text(content[:_HEAD]):
        raise UserError(f"{path}: {what}")
    try:
        return without_mark(content).decode()
    except UnicodeDecodeError as error:
        kind = "not valid JSON: " if path.suffix == ".json" else ""
        raise UserError(f"{path}: {kind}not UTF-8: {error.reason} at byte {error.start}") from None


def _is_cut_off(error: Exception, content: str) -> bool:
    """Whether what is missing is missing at the end."""
    at_end = isinstance(error, json.JSONDecodeError) and error.pos >= len(content.rstrip())
    return at_end or str(error).startswith("Unterminated string")


def _check_generation_config(value: dict[str, Any], path: Path) -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = value.get(name)
        tokens = token if isinstance(token, list) else [token]
        if token is not None and not all(type(one) is int and one >= 0 for one in tokens):
            raise UserError(f"{path}: {name} is {token!r}: a token's number, or a list of such, is needed")


def _check_chat_template(value: dict[str, Any], path: Path) -> None:
    template = value.get("chat_template")
    if not isinstance(template, str | list | dict):
        raise UserError(f"{path}: chat_template is {type(template).__name__}: the text of a template is needed")


def _check_tokenizer_config(value: dict[str, Any], path: Path) -> None:
    length = value.get("model_max_length")
    if length is not None and (isinstance(length, bool) or not isinstance(length, int | float)):
        raise UserError(f"{path}: model_max_length is {length!r}: a number of tokens is needed")
    template = value.get("chat_template")
    # Several have names: in a mapping, or in a list of mappings.
    several = template if isinstance(template, list) else [template]
    texts = [one.get("template") if isinstance(template, list) and isinstance(one, dict) else one for one in several]
    if template is not None and not all(isinstance(text, str | dict) for text in texts):
        raise UserError(f"{path}: chat_template holds no text: that of a template is needed, or a list of such by name")


_CHECKS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "generation_config.json": _check_generation_config,
    "chat_template.json": _check_chat_template,
    "tokenizer_config.json": _check_tokenizer_config,
}
