"""Kubernetes structural schemas from the pydantic types.

The rules followed: https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/
(structural schemas, defaulting and nullable, validation rules).
"""

from __future__ import annotations

import functools
from typing import Any

from rljob_api.base import INT64_MAX, ApiModel
from rljob_api.rules import Rule, rules_on, transition_rules

Node = dict[str, Any]

_COPIED = (
    "type",
    "format",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
)


@functools.cache
def structural_schema(model: type[ApiModel]) -> Node:
    """Return the structural schema of a block: references inlined, defaults, enums and CEL rules in place.

    It is made once: do not change it.
    """
    source = model.model_json_schema(by_alias=True, mode="validation")
    return _Converter(source.get("$defs", {}), _subclasses(ApiModel)).block(source, model)


def subschema(schema: Node, path: tuple[str | int, ...]) -> Node | None:
    """Return the schema node at a path of field names and list indices, or None where there is none."""
    node: Node | None = schema
    for part in path:
        if node is None:
            return None
        if isinstance(part, int):
            node = node.get("items")
        else:
            extra = node.get("additionalProperties")
            node = node.get("properties", {}).get(part) or (extra if isinstance(extra, dict) else None)
    return node


def without_unknown(node: Node, value: Any) -> Any:
    """The part of a value that an API server with this schema keeps: unknown fields are left out."""
    properties, extra = node.get("properties"), node.get("additionalProperties")
    if isinstance(value, list):
        return [without_unknown(node.get("items", {}), item) for item in value]
    if not isinstance(value, dict) or node.get("x-kubernetes-preserve-unknown-fields"):
        return value
    if isinstance(extra, dict):
        return {name: without_unknown(extra, item) for name, item in value.items()}
    if properties is None:
        return value
    return {name: without_unknown(properties[name], item) for name, item in value.items() if name in properties}


def without_item_defaults(node: Node, *, in_list: bool = False) -> Node:
    """Return the schema without defaults of fields in lists.

    A default that the API server puts into a list makes another list of it than the manifest's: `kubectl apply` then
    finds a change each time, and an apply by another manager a conflict. The operator has the defaults.
    """
    made = {key: value for key, value in node.items() if not (in_list and key in ("default", "nullable"))}
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            made[key] = without_item_defaults(node[key], in_list=in_list or key == "items")
    if "properties" in node:
        made["properties"] = {
            name: without_item_defaults(field, in_list=in_list) for name, field in node["properties"].items()
        }
    return made


def without_repeated_texts(spec: Node) -> Node:
    """Return the schema of `spec` in which a field in a list, in data or in an evaluation refers to the equal field
    elsewhere that has its text: `kubectl apply` keeps what it applied in an annotation of at most 256 KiB."""
    described: list[tuple[Node, str]] = []
    _note_blocks(spec, "spec", described)
    # The outermost has it.
    described.sort(key=lambda block: block[1].count("."))
    return _referring(spec, "spec", described, repeated=False)


def _note_blocks(node: Node, path: str, described: list[tuple[Node, str]]) -> None:
    for name, field in node.get("properties", {}).items():
        for block, at in ((field, f"{path}.{name}"), (field.get("items", {}), f"{path}.{name}[]")):
            if "properties" in block and name != "evaluation":
                described.append((block["properties"], at))
                _note_blocks(block, at, described)


def _referring(node: Node, path: str, described: list[tuple[Node, str]], *, repeated: bool) -> Node:
    made = dict(node)
    if "items" in node:
        made["items"] = _referring(node["items"], f"{path}[]", described, repeated=True)
    for name, field in node.get("properties", {}).items():
        like = next((at for fields, at in described if repeated and fields.get(name) == field), path)
        below = _referring(field, f"{path}.{name}", described, repeated=repeated or name in ("data", "evaluation"))
        if like != path and len(reference := f"See {like}.") < len(field.get("description", "")):
            below["description"] = reference
        made["properties"] = made["properties"] | {name: below}
    return made


def _subclasses(base: type[ApiModel]) -> dict[str, type[ApiModel]]:
    found: dict[str, type[ApiModel]] = {}
    for cls in base.__subclasses__():
        found[cls.__name__] = cls
        found.update(_subclasses(cls))
    return found


class _Converter:
    """Turns pydantic's JSON schema into a structural one."""

    def __init__(self, definitions: dict[str, Node], models: dict[str, type[ApiModel]]) -> None:
        self.definitions = definitions
        self.models = models

    def block(self, source: Node, model: type[ApiModel]) -> Node:
        node: Node = {"type": "object", "description": " ".join(source.get("description", "").split())}
        if required := source.get("required"):
            node["required"] = list(required)
        node["properties"] = {name: self.convert(field) for name, field in source["properties"].items()}
        for rule in rules_on(model):
            _add_rule(node, rule)
        return node

    def convert(self, source: Node) -> Node:
        core, accepts_null = _without_null(source)
        node = self._definition(core["$ref"].rsplit("/", 1)[1]) if "$ref" in core else self._plain(core)
        if "description" in source:
            node["description"] = " ".join(source["description"].split())
        default = source.get("default")
        # A block that is not given stays away: with all blocks' defaults an object is five times as large, and every
        # write of it takes the API server twice as long. Fields of a block that is given get theirs.
        if default is not None and "properties" not in node:
            node["default"] = default
            if accepts_null:
                node["nullable"] = True
        return dict(sorted(node.items(), key=lambda item: _ORDER.get(item[0], 9)))

    def _definition(self, name: str) -> Node:
        definition = self.definitions[name]
        if "properties" in definition:
            return self.block(definition, self.models[name])
        return {"description": " ".join(definition.get("description", "").split()), **self._plain(definition)}

    def _plain(self, source: Node) -> Node:
        node = {key: source[key] for key in _COPIED if key in source}
        for bound, limit in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if limit in source:
                node[bound], node[limit] = source[limit], True
        if node.get("maximum") == INT64_MAX:
            del node["maximum"]
        if "const" in source:
            node.update(type="string", enum=[source["const"]])
        if "items" in source:
            node["items"] = self.convert(source["items"])
        if node.get("type") == "object":
            self._mapping(source, node)
        return node

    def _mapping(self, source: Node, node: Node) -> None:
        values = source.get("additionalProperties")
        if isinstance(values, dict) and values:
            node["additionalProperties"] = self.convert(values)
            return
        node["x-kubernetes-preserve-unknown-fields"] = True
        if "properties" in source:
            node["properties"] = {name: dict(field) for name, field in source["properties"].items()}


_ORDER = {"type": 0, "format": 1, "description": 2, "default": 3, "nullable": 4, "enum": 5, "required": 6}


def _without_null(source: Node) -> tuple[Node, bool]:
    options = source.get("anyOf")
    if options is None:
        return source, False
    kept = [option for option in options if option.get("type") != "null"]
    if len(kept) != 1:
        raise TypeError(f"a union of {len(kept)} types has no structural schema: {source}")
    beside = {key: value for key, value in source.items() if key not in ("anyOf", "default", "description", "title")}
    return {**kept[0], **beside}, len(kept) < len(options)


def _add_rule(block: Node, rule: Rule) -> None:
    if rule.cel is None:
        return
    node = subschema(block, tuple(rule.field.split("."))) if rule.at_field else block
    assert node is not None, f"no field {rule.field}"
    node.setdefault("x-kubernetes-validations", []).append(rule_entry(rule))


def transition_entries() -> list[Node]:
    """Return the `x-kubernetes-validations` entries about what may change; they belong to the whole object."""
    return [
        {
            "rule": cel,
            "message": message,
            "messageExpression": naming,
            "fieldPath": ".spec",
            "reason": "FieldValueForbidden",
        }
        for cel, message, naming in transition_rules()
    ]


def rule_entry(rule: Rule) -> Node:
    """Return the `x-kubernetes-validations` entry of a rule that has CEL."""
    if rule.field.startswith("metadata."):  # the schema of metadata is closed to us, so a fieldPath would lead nowhere
        return {"rule": rule.cel, "message": f"{rule.field}: {rule.message}"}
    path = {"fieldPath": f".{rule.field}"} if rule.field and not rule.at_field else {}
    return {"rule": rule.cel, "message": rule.message, **path}


def describe(node: Node, *, largest: bool = False) -> str:
    """Return the type of a field and what it allows, in words; `largest`: with bounds that say little otherwise."""
    if "enum" in node:
        return "one of " + ", ".join(str(value) for value in node["enum"])
    kind = node.get("type", "any value")
    if kind == "array":
        limit = f" (at most {node['maxItems']})" if "maxItems" in node else ""
        return f"list of {describe(node['items'])}{limit}"
    if kind == "object":
        if "additionalProperties" in node:
            return f"mapping of names to {describe(node['additionalProperties'])}"
        return "free-form mapping" if node.get("x-kubernetes-preserve-unknown-fields") else "block"
    return {"integer": "whole number", "boolean": "true or false"}.get(kind, str(kind)) + _bounds(node, largest)


def _bounds(node: Node, largest: bool) -> str:
    parts = []
    if "minimum" in node:
        parts.append(("above " if node.get("exclusiveMinimum") else "at least ") + _number(node["minimum"]))
    if largest and node.get("format") == "int64" and "maximum" not in node:
        parts.append(f"at most {INT64_MAX}")
    elif "maximum" in node and (largest or node["maximum"] < 2**31 - 1):
        parts.append(("below " if node.get("exclusiveMaximum") else "at most ") + _number(node["maximum"]))
    if "pattern" in node:
        parts.append(f"like {node['pattern']}")
    elif node.get("minLength") == 1:
        parts.append("not empty")
    if largest and "maxLength" in node:
        parts.append(f"at most {node['maxLength']} characters")
    if node.get("format") == "date-time":
        parts.append("a time like 2026-01-31T12:00:00Z")
    return (", " + " and ".join(parts)) if parts else ""


def _number(value: float) -> str:
    return f"{value:g}" if abs(value) < 1e6 else str(int(value))
