"""Checks that the schema and CEL cannot express: free-form mappings, names and texts, where a manifest is read."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from rljob_api import kubernetes_names as names
from rljob_api.quantities import to_number


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a block."""

    path: tuple[str | int, ...]
    """Relative to the block, in camelCase."""
    wrong: str
    allowed: str


Check = Callable[[Any], Iterator[Finding]]
"""Gets a block with snake_case attributes, without those that the schema refuses."""

NAME = "lower-case letters, digits, '-' and '.', a letter or digit first and last, at most 253"
LABEL_KEY = "at most 63 letters, digits, '-', '_' and '.', like a.b/name"
LABEL_VALUE = "at most 63 letters, digits, '-', '_' and '.'"
FUNCTION = "package.module:function, or ./file.py:function"
LEAST_MEMORY = 64 * 2**20
"""Bytes of a process that imports Python."""
_SCHEME = re.compile("[A-Za-z][A-Za-z0-9+.-]*://")


def labels(at: tuple[str | int, ...], values: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Keys and values of labels."""
    yield from keys(at, values)
    for key, value in (values or {}).items():
        if not isinstance(value, str) or not names.is_label_value(value):
            yield Finding((*at, key), "is no value of a label", LABEL_VALUE)


def keys(at: tuple[str | int, ...], values: Iterable[str] | None) -> Iterator[Finding]:
    """Keys of labels or annotations."""
    for key in values or ():
        if not names.is_label_key(key):
            yield Finding((*at, key), "is no key", LABEL_KEY)


def object_name(at: tuple[str | int, ...], name: str | None, what: str) -> Iterator[Finding]:
    """The name of a Kubernetes object."""
    if name is not None and not names.is_subdomain(name):
        yield Finding(at, f"is no name of a {what}", NAME)


def unprintable(text: str) -> bool:
    """Whether a text holds characters that no name, path or variable can."""
    return any(ord(character) < 32 or ord(character) == 127 for character in text)


def named_object(at: tuple[str | int, ...], path: str | None, form: str) -> Iterator[Finding]:
    """`package.module:NAME` or `FILE.py:NAME`, whose form the schema has checked; `form` says it in words."""
    if path is not None and unprintable(path):
        yield Finding(at, "holds control characters", form)
    elif path is not None and keyword.iskeyword(name := path.rpartition(":")[2]):
        yield Finding(at, f"{name} is a word of Python's, and names nothing", form)


def argument_name(field: str, name: str) -> Iterator[Finding]:
    """A name that an argument of a Python function has to have."""
    if not name.isidentifier() or keyword.iskeyword(name):
        yield Finding((field, name), "is no name of an argument", "letters, digits and '_', no word of Python's")


def address_fault(address: str) -> str:
    """Fault of an address; empty where there is none."""
    try:
        parts = urlsplit(address)
        if parts.port == 0:
            return "has no port that could be reached"
    except ValueError as error:
        return f"is no address: {error}"
    return "" if parts.hostname else "names no host"


def path_faults(field: str, path: str | None, what: str, suffixes: set[str]) -> Iterator[Finding]:
    """Faults of a path to files that are read, which `what` describes; files of these suffixes are not."""
    if path is None:
        return
    if not path.strip() or unprintable(path):
        yield Finding((field,), "is no path: it is empty or holds control characters", what)
    elif path != path.strip():
        yield Finding((field,), "has blanks around it", what)
    elif _SCHEME.match(path):
        yield Finding((field,), "addresses are not read: mount the storage, or name a hub id", what)
    elif PurePosixPath(path).suffix.lower() in suffixes:
        yield Finding((field,), f"{PurePosixPath(path).suffix} files are not read", what)


def snake(name: str) -> str:
    """Name of a camelCase field as Python has it."""
    return re.sub("([A-Z])", lambda m: "_" + m[1].lower(), name)


def one_line(*fields: str) -> Check:
    """Check names that stand in tables, labels and addresses."""

    def check(block: Any) -> Iterator[Finding]:
        for field in fields:
            value = getattr(block, snake(field))
            if value is not None and (not value.strip() or unprintable(value)):
                yield Finding((field,), "is blank, or holds control characters", "a name in one line")

    return check


def at_least(field: str, least: str) -> Check:
    """Check an amount, where there is one."""

    def check(block: Any) -> Iterator[Finding]:
        value = getattr(block, snake(field))
        if value is not None and to_number(value) < to_number(least):
            yield Finding((field,), "is too little", f"at least {least}")

    return check
