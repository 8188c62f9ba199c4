"""`--set path=value`: settings put over a manifest before it is checked."""

from __future__ import annotations

import copy
import re
from typing import Any

from rljob_api.blocks import path_text
from rljob_api.how_many import how_many
from rljob_api.problems import ManifestError, Problem
from rljob_api.yaml_text import MAX_DEPTH, YamlError, parse_yaml

_PART = re.compile(r"\.?([A-Za-z_][\w-]*)|\[([^\[\]]+)\]")
_FORM = "PATH=VALUE, like spec.training.tensorParallel=2, spec.data.sources[0].weight=0.5, spec.rollout.stop=[a, b]"

_MOST_SHOWN = 300


def apply_overrides(document: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Return a copy of a manifest with settings put over it.

    A path is made of field names with dots, list indices (`sources[0]`; the length of the list appends) and other keys
    in brackets (`nodeSelector[kubernetes.io/arch]`). A value is a YAML scalar or JSON; `null` takes a field away.
    Unknown fields are left to the validation, which names the nearest.

    Raises:
        ManifestError: naming each override that is malformed or does not fit the document.
    """
    changed, problems = copy.deepcopy(document), []
    for override in overrides:
        try:
            path, value = _parse(override)
            _put(changed, path, value)
        except ValueError as error:
            shown = override if len(override) <= _MOST_SHOWN else f"{override[: _MOST_SHOWN - 3]}..."
            problems.append(Problem(f"--set {shown}", str(error), _FORM))
    if problems:
        raise ManifestError(problems, "overrides")
    return changed


def _parse(override: str) -> tuple[list[str | int], Any]:
    path, equals, text = override.partition("=")
    if not equals:
        raise ValueError("has no '='")
    parts: list[str | int] = []
    position = 0
    path = path.strip()
    while position < len(path):
        match = _PART.match(path, position)
        if match is None or (position == 0 and path[0] in ".["):
            raise ValueError(f"the path is malformed at {path[position:]!r}")
        name, bracket = match.groups()
        parts.append(name if name is not None else int(bracket) if bracket.isdigit() else bracket)
        position = match.end()
        if position < len(path) and path[position] not in ".[":
            raise ValueError(f"the path is malformed at {path[position:]!r}")
    if not parts:
        raise ValueError("has no path")
    if len(parts) > MAX_DEPTH:
        raise ValueError(f"the path has {len(parts)} parts; no field lies deeper than {MAX_DEPTH}")
    try:
        return parts, parse_yaml(text)
    except YamlError as error:
        raise ValueError(f"the value is no YAML: {error}") from None


def _put(document: dict[str, Any], path: list[str | int], value: Any) -> None:
    node: Any = document
    for i, part in enumerate(path[:-1]):
        child = _child(node, part, path[:i])
        if child is None:
            child = [] if isinstance(path[i + 1], int) else {}
            _store(node, part, child)
        node = child
    _child(node, path[-1], path[:-1])
    _store(node, path[-1], value)


def _child(node: Any, part: str | int, at: list[str | int]) -> Any:
    """Return what is at `part`, or None where nothing is yet."""
    where = path_text(tuple(at)) or "the document"
    if isinstance(part, int):
        if not isinstance(node, list):
            raise ValueError(f"{where} is no list")
        if part > len(node):
            raise ValueError(f"{where} has {how_many(len(node), 'item')}, so [{part}] is beyond its end")
        return node[part] if part < len(node) else None
    if not isinstance(node, dict):
        raise ValueError(f"{where} is no mapping")
    return node.get(part)


def _store(node: Any, part: str | int, value: Any) -> None:
    if isinstance(node, list) and part == len(node):
        node.append(value)
    else:
        node[part] = value
