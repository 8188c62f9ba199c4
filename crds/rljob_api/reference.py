"""docs/reference.md and docs/zh/reference.md: a table for each block."""

from __future__ import annotations

import json
import re
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

[中文](zh/reference.md)

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


class Texts:
    """English texts of the reference. A subclass translates; what it does not have stays English."""

    introduction = _INTRODUCTION
    columns = "| field | type | default | meaning |"
    required = "**required**"
    rules = "Rules:"
    may_change = _MAY_CHANGE
    at_any_time, while_suspended = "at any time", "while suspended"

    def text(self, english: str) -> str:
        """Return the description of a field, a block or an allowed change."""
        return english

    def kind(self, english: str) -> str:
        """Return the type of a field, as `schema.describe` has it."""
        return english

    def list_of(self, link: str) -> str:
        """Return the type of a field that has several blocks."""
        return f"list of {link}"

    def effect(self, english: str) -> str:
        """Return the effect of a change, a value of `rules.Effect`."""
        return english


def reference(texts: Texts | None = None) -> str:
    """Return the reference as Markdown, in the language of `texts` (default: English)."""
    texts = texts or Texts()
    parts = [texts.introduction]
    for blocks in _all_blocks():
        paths = {block: path for block, path, _ in blocks}
        parts += [_section(block, path, node, paths, texts) for block, path, node in blocks]
    return "\n".join([*parts, _may_change(texts)])


def described() -> dict[str, str]:
    """Return key -> English text of all that has a description.

    Keys are the path of a field (`spec.steps`), `block PATH` for a block and `change PATH` for an allowed change.
    """
    found: dict[str, str] = {}
    for blocks in _all_blocks():
        for block, path, node in blocks:
            found[f"block {path}"] = _documentation(block)
            found |= {f"{path}.{alias}": node["properties"][alias].get("description", "") for alias in fields_of(block)}
    found |= {f"change {change.path}": change.reason for change in CHANGES}
    return {key: text for key, text in found.items() if text}


def _all_blocks() -> list[list[tuple[type[ApiModel], str, Node]]]:
    return [
        _blocks(model, name, structural_schema(model)) for model, name in ((RLJobSpec, "spec"), (RLJobStatus, "status"))
    ]


def _documentation(model: type[ApiModel]) -> str:
    return (model.__doc__ or "").strip()


def _may_change(texts: Texts) -> str:
    rows = (
        f"| `{change.path}` | {texts.at_any_time if change.any_time else texts.while_suspended} | "
        f"{texts.effect(change.effect.value)} | {_cell(texts.text(change.reason))} |"
        for change in CHANGES
    )
    return texts.may_change + "\n".join(rows) + "\n"


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


def _section(model: type[ApiModel], path: str, node: Node, paths: dict[type[ApiModel], str], texts: Texts) -> str:
    lines = [
        f"## {path}",
        "",
        texts.text(_documentation(model)),
        "",
        texts.columns,
        "|---|---|---|---|",
    ]
    for alias, of_type in fields_of(model).items():
        field = node["properties"][alias]
        kind = (
            _as_code(texts.kind(describe(field)))
            if of_type.block is None
            else _link(paths[of_type.block], of_type.many, texts)
        )
        meaning = texts.text(field.get("description", ""))
        lines.append(f"| `{alias}` | {_cell(kind)} | {_default(field, node, alias, texts)} | {_cell(meaning)} |")
    if rules := rules_on(model):
        lines += ["", texts.rules, ""]
        lines += [f"- {f'`{rule.field}`: ' if rule.field else ''}{rule.message}" for rule in rules]
    return "\n".join([*lines, ""])


def _as_code(kind: str) -> str:
    """With patterns, whose brackets and stars mean something in Markdown, in code style."""
    return re.sub(r"(\^\S+|\^/)", r"`\1`", kind)


def _link(path: str, many: bool, texts: Texts) -> str:
    anchor = path.lower().replace(".", "").replace("[]", "")
    link = f"[{path}](#{anchor})"
    return texts.list_of(link) if many else link


def _default(field: Node, parent: Node, alias: str, texts: Texts) -> str:
    if alias in parent.get("required", []):
        return texts.required
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
