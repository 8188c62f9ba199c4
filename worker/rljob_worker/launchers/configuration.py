"""Configurations in YAML, as Hydra reads them, and overrides of a command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from rljob_api.yaml_text import YamlError, parse_yaml
from rljob_worker.errors import UserError
from rljob_worker.launchers.draft import Setting
from rljob_worker.launchers.shell import Word

_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_ANY = re.compile(r"\$\{[^}]*\}|\$\w+|\$\([^)]*\)")
_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
_DEPTH = 16
"""References to references that are followed."""


def read_configuration(text: str) -> dict[str, object]:
    """The mapping of a YAML file.

    Raises:
        UserError: it is none.
    """
    try:
        found = parse_yaml(text)
    except YamlError as error:
        raise UserError(f"is no YAML: {error}") from None
    if not isinstance(found, dict):
        raise UserError("is no mapping of settings")
    return found


def flattened(document: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of a document by their dotted names; a list is one leaf."""
    for key, value in document.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{name}.")
        else:
            yield name, value


def settings_of(leaves: Mapping[str, object]) -> list[Setting]:
    """The settings, with references to others resolved."""
    return [_resolved(name, value, leaves) for name, value in leaves.items()]


def _resolved(name: str, value: object, leaves: Mapping[str, object]) -> Setting:
    for _ in range(_DEPTH):
        if not isinstance(value, str):
            return Setting(name, value)
        whole = _REFERENCE.fullmatch(value)
        if whole and whole[1] in leaves:
            value = leaves[whole[1]]
            continue
        expanded = _REFERENCE.sub(lambda found: str(leaves.get(found[1], found[0])), value)
        if expanded == value:
            break
        value = expanded
    return Setting(name, value, tuple(_ANY.findall(str(value))))


def overrides_of(words: Iterable[Word], conditional: set[str]) -> Iterator[Setting]:
    """The settings `name=value` of a command line; YAML values are read."""
    for word in words:
        found = _OVERRIDE.fullmatch(word.text)
        if not found:
            continue
        try:
            value = parse_yaml(found[3]) if found[3] and not word.unknown else found[3]
        except YamlError:
            value = found[3]
        yield Setting(found[2], value, word.unknown, tuple(sorted(word.used & conditional)))
