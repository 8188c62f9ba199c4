"""docs/reference.md: a table for each block."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rljob_api.base import ApiModel
from rljob_api.blocks import block_in, camel_fields
from rljob_api.job import GROUP, KIND, VERSION
from rljob_api.rules import MUTABLE_FIELDS, rules_on
from rljob_api.schema import Node, describe, structural_schema
from rljob_api.spec import RLJobSpec
from rljob_api.status import RLJobStatus

_INTRODUCTION = f"""# RLJob reference

<!-- Generated from crds/rljob_api by `python -m rljob_api.generate`. Do not edit. -->

`apiVersion: {GROUP}/{VERSION}`, `kind: {KIND}`. Durations are seconds and sizes bytes unless a field says otherwise.
A field without a default is optional, unless it is marked **required**. Unknown fields are refused.

After creation these fields of `spec` may change, and no others: {", ".join(f"`{name}`" for name in MUTABLE_FIELDS)}.
"""


def reference() -> str:
    """Return the reference as Markdown."""
    parts = [_INTRODUCTION]
    seen: dict[type[ApiModel], str] = {}
    for model, name in ((RLJobSpec, "spec"), (RLJobStatus, "status")):
        for block, path, node in _blocks(model, name, structural_schema(model), seen):
            parts.append(_section(block, path, node, seen))
    return "\n".join(parts)


def _blocks(
    model: type[ApiModel], path: str, node: Node, seen: dict[type[ApiModel], str]
) -> Iterator[tuple[type[ApiModel], str, Node]]:
    if model in seen:
        return
    seen[model] = path
    yield model, path, node
    for alias, name in camel_fields(model).items():
        block, many = block_in(model.model_fields[name].annotation)
        if block is not None:
            child = node["properties"][alias]
            child_path = f"{path}.{alias}[]" if many else f"{path}.{alias}"
            yield from _blocks(block, child_path, child["items"] if many else child, seen)


def _section(model: type[ApiModel], path: str, node: Node, seen: dict[type[ApiModel], str]) -> str:
    lines = [
        f"## {path}",
        "",
        (model.__doc__ or "").strip(),
        "",
        "| field | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for alias, name in camel_fields(model).items():
        field = node["properties"][alias]
        block, many = block_in(model.model_fields[name].annotation)
        kind = describe(field) if block is None else _link(seen.get(block, f"{path}.{alias}"), many)
        lines.append(
            f"| `{alias}` | {_cell(kind)} | {_default(field, node, alias)} | {_cell(field.get('description', ''))} |"
        )
    if rules := rules_on(model):
        lines += ["", "Rules:", ""]
        lines += [f"- {f'`{rule.field}`: ' if rule.field else ''}{rule.message}" for rule in rules]
    return "\n".join([*lines, ""])


def _link(path: str, many: bool) -> str:
    anchor = path.lower().replace(".", "").replace("[]", "")
    return f"{'list of ' if many else ''}[{path}](#{anchor})"


def _default(field: Node, parent: Node, alias: str) -> str:
    if alias in parent.get("required", []):
        return "**required**"
    value: Any = field.get("default")
    if value is None or value in ({}, []):
        return ""
    return (
        f"`{_number(value)}`"
        if isinstance(value, float)
        else f"`{value if isinstance(value, str) else json.dumps(value)}`"
    )


def _number(value: float) -> str:
    return f"{value:g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
