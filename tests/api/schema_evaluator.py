"""An API server's handling of a manifest: nulls, defaults, and CEL rules (evaluated by Google's CEL runtime)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_optional

from rljob_api.crd import custom_resource_definition
from rljob_api.spec import AlgorithmSpec

Node = dict[str, Any]
Broken = tuple[tuple[str | int, ...], str]


@functools.cache
def root_schema() -> Node:
    return custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


@functools.cache
def compile_rule(rule: str) -> Any:
    variables = {"self": cel.Type.DYN, "oldSelf": cel.Type.DYN}
    environment = cel.NewEnv(variables=variables, extensions=[ext_optional.ExtOptional()])
    return environment.compile(rule)


def admit(manifest: dict[str, Any], schema: Node | None = None) -> dict[str, Any]:
    """Return the manifest as it would be stored: nulls dropped, defaults filled in; of an RLJob, or by this schema."""
    return _fill(root_schema() if schema is None else schema, copy.deepcopy(manifest))


OF_THE_ALGORITHM = {
    info.alias for info in AlgorithmSpec.model_fields.values() if info.default_factory_takes_validated_data
}


def filled_alike(stored: Any, typed: Any, *, in_list: bool = False) -> bool:
    """Whether a stored spec has the defaults of the types.

    But for blocks that were not given, which stay away, fields whose default follows from the algorithm, and fields in
    lists, which are stored as they were applied.
    """
    if isinstance(stored, list) and isinstance(typed, list):
        return len(stored) == len(typed) and all(
            filled_alike(one, other, in_list=True) for one, other in zip(stored, typed, strict=True)
        )
    if not isinstance(stored, dict) or not isinstance(typed, dict):
        return bool(stored == typed)
    away = [name for name in typed if name not in stored]
    return all(in_list or isinstance(typed[name], dict) or name in OF_THE_ALGORITHM for name in away) and all(
        name in typed and filled_alike(value, typed[name], in_list=in_list) for name, value in stored.items()
    )


def broken_rules(
    manifest: dict[str, Any], old: dict[str, Any] | None = None, schema: Node | None = None
) -> list[Broken]:
    """Return (path, message) of each rule that an admitted manifest breaks, or an update of `old` does."""
    return list(_evaluate(root_schema() if schema is None else schema, manifest, old, ()))


def _fill(node: Node, value: Any) -> Any:
    if isinstance(value, list):
        return [_fill(node.get("items", {}), item) for item in value]
    if not isinstance(value, dict):
        return float(value) if node.get("type") == "number" and value is not None else value
    fields = node.get("properties", {})
    kept = {k: v for k, v in value.items() if v is not None or k not in fields or fields[k].get("nullable")}
    for name, field in fields.items():
        if name not in kept and "default" in field:
            kept[name] = copy.deepcopy(field["default"])
    extra = node.get("additionalProperties") or {}
    return {name: _fill(fields.get(name, extra), item) for name, item in kept.items()}


def _evaluate(node: Node, value: Any, old: Any, at: tuple[str | int, ...]) -> Iterator[Broken]:
    for entry in node.get("x-kubernetes-validations", []):
        if "oldSelf" in entry["rule"] and old is None:
            continue
        result = compile_rule(entry["rule"]).eval(data={"self": value, "oldSelf": old})
        assert result.type() == cel.Type.BOOL, f"{at} {entry['rule']}: {result.value()}"
        if not result.value():
            message = entry["message"]
            if "messageExpression" in entry:
                message = compile_rule(entry["messageExpression"]).eval(data={"self": value, "oldSelf": old}).value()
            yield (*at, *filter(None, entry.get("fieldPath", "").split("."))), message
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _evaluate(node.get("items", {}), item, None, (*at, i))
    elif isinstance(value, dict):
        for name, item in value.items():
            field = node.get("properties", {}).get(name)
            if field is not None:
                yield from _evaluate(field, item, (old or {}).get(name), (*at, name))
