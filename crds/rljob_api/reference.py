"""docs/reference.md: a table for each block."""

from __future__ import annotations

import json
from typing import Any

from rljob_api.base import ApiModel
from rljob_api.blocks import fields_of
from rljob_api.job import GROUP, KIND, VERSION
from rljob_api.rules import CHANGES, rules_on
from rljob_api.schema import Node, describe, structural_schema
from rljob_api.spec import RLJobSpec
from rljob_api.status import RLJobStatus

_INTRODUCTION = f"""# RLJob reference

<!-- Generated from crds/rljob_api by `python -m rljob_api.generate`. Do not edit. -->

`apiVersion: {GROUP}/{VERSION}`, `kind: {KIND}`. Durations are seconds and sizes bytes unless a field says otherwise.
A field without a default is optional, unless it is marked **required**. Unknown fields are refused. A block that is
left out is one whose fields all have their defaults; the API server does not store it.

Some fields of `spec` may change after creation: [what may change](#what-may-change).
"""

_MAY_CHANGE = """## What may change

Fields of `spec` that a job may change after its first attempt, with all that is below them; no others may, neither by
`kubectl apply` nor by `rljob run --resume`, which alone takes
[another parallel layout](running.md#resuming-in-another-layout) too. Before its first attempt everything may change.
*While suspended* is while the job holds no devices (`suspend: true`), and at a resume. By their effect on what is
computed:

- none: the same samples and weights, bit for bit;
- some samples: those whose reward failed, or of rows that are left out, are others;
- rounding: the same sums in another order. The first step with such a change says so in its record (`changed`), and
  `rljob audit` and `rljob replay` name it: from there on bits may differ from those of a run that was not changed.

| field | when | effect | reason |
|---|---|---|---|
"""


def reference() -> str:
    """Return the reference as Markdown."""
    parts = [_INTRODUCTION]
    for model, name in ((RLJobSpec, "spec"), (RLJobStatus, "status")):
        blocks = _blocks(model, name, structural_schema(model))
        paths = {block: path for block, path, _ in blocks}
        parts += [_section(block, path, node, paths) for block, path, node in blocks]
    return "\n".join([*parts, _may_change()])


def _may_change() -> str:
    rows = (
        f"| `{change.path}` | {'at any time' if change.any_time else 'while suspended'} | {change.effect.value} | "
        f"{_cell(change.reason)} |"
        for change in CHANGES
    )
    return _MAY_CHANGE + "\n".join(rows) + "\n"


def _blocks(model: type[ApiModel], path: str, node: Node) -> list[tuple[type[ApiModel], str, Node]]:
    """Each block type once, where it is nearest to the root."""
    found = [(model, path, node)]
    for parent, parent_path, parent_node in found:
        for alias, field in fields_of(parent).items():
            block = field.block
            if block is None or any(block is other for other, _, _ in found):
                continue
            child = parent_node["properties"][alias]
            child_path = f"{parent_path}.{alias}"
            found.append((block, f"{child_path}[]", child["items"]) if field.many else (block, child_path, child))
    order = {path: i for i, (_, path, _) in enumerate(found)}
    return sorted(found, key=lambda item: _depth_first(item[1], order))


def _depth_first(path: str, order: dict[str, int]) -> list[int]:
    parts = path.split(".")
    return [order.get(".".join(parts[: i + 1]), 0) for i in range(len(parts))]


def _section(model: type[ApiModel], path: str, node: Node, paths: dict[type[ApiModel], str]) -> str:
    lines = [
        f"## {path}",
        "",
        (model.__doc__ or "").strip(),
        "",
        "| field | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for alias, of_type in fields_of(model).items():
        field = node["properties"][alias]
        kind = describe(field) if of_type.block is None else _link(paths[of_type.block], of_type.many)
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
