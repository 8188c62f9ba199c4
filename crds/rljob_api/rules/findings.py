"""Checks that the schema and CEL cannot express: free-form mappings, names and texts, where a manifest is read."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rljob_api import kubernetes_names as names


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


def address_fault(address: str) -> str:
    """Fault of an address; empty where there is none."""
    try:
        parts = urlsplit(address)
        if parts.port == 0:
            return "has no port that could be reached"
    except ValueError as error:
        return f"is no address: {error}"
    return "" if parts.hostname else "names no host"
