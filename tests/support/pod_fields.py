"""Write the fields of pods for validation, `crds/rljob_api/pod_fields.json`, from the client's models.

    python tests/support/pod_fields.py [--check]

A model is a mapping of its fields to their types: `string`, `integer`, `boolean`, `any`, another model's name, a list
(`[TYPE]`) or a mapping (`{TYPE}`). An exclamation mark behind the type says that the field is needed.
"""

from __future__ import annotations

import json
import sys
from typing import Any, get_args, get_origin

from kubernetes.client import V1PodSpec
from pydantic import BaseModel, StrictBool, StrictInt, StrictStr

from rljob_api.generate import write_or_check

FILE = "crds/rljob_api/pod_fields.json"
_PLAIN: dict[Any, str] = {
    **dict.fromkeys((StrictStr, str), "string"),
    **dict.fromkeys((StrictInt, int), "integer"),
    **dict.fromkeys((StrictBool, bool), "boolean"),
}
_AMOUNTS = {
    "PodSpec": ("overhead",),
    "ResourceRequirements": ("limits", "requests"),
    "VolumeResourceRequirements": ("limits", "requests"),
    "EmptyDirVolumeSource": ("sizeLimit",),
    "ResourceFieldSelector": ("divisor",),
}
"""Fields that hold amounts: the models call them strings, and the API server takes numbers too."""
_PORTS = {"HTTPGetAction": ("port",), "TCPSocketAction": ("port",)}
"""Fields that hold a port or its name."""

_FURTHER = {"PodSpec": {"workloadRef": "any"}}
"""Fields of servers that the client's version has not, or no more."""


def _type(annotation: Any, models: dict[str, Any]) -> str:
    inner = [part for part in get_args(annotation) if part is not type(None)]
    origin = get_origin(annotation)
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if origin is list:
        return f"[{_type(inner[0], models)}]"
    if origin is dict:
        return "{" + _type(inner[1], models) + "}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _model(annotation, models)
    # `Optional[...]`, and types with bounds.
    return _type(inner[0], models) if inner and annotation is not Any else "any"


def _model(model: type[BaseModel], models: dict[str, Any]) -> str:
    name = model.__name__.removeprefix("V1")
    if name not in models:
        fields = models.setdefault(name, {})
        names = model.attribute_map  # type: ignore[attr-defined]
        for key, field in model.model_fields.items():
            of_type, alias = _type(field.annotation, models), names[field.alias or key]
            if alias in _AMOUNTS.get(name, ()):
                of_type = of_type.replace("string", "amount")
            elif alias in _PORTS.get(name, ()):
                of_type = "port"
            fields[alias] = of_type + "!" * field.is_required()
    return name


def generated_files() -> dict[str, str]:
    """Return path below the repository -> content."""
    models: dict[str, Any] = {}
    _model(V1PodSpec, models)
    for name, fields in _FURTHER.items():
        models[name] |= fields
    lines = (f"  {json.dumps(name)}: {json.dumps(models[name])}" for name in sorted(models))
    return {FILE: "{\n" + ",\n".join(lines) + "\n}\n"}


if __name__ == "__main__":
    sys.exit(write_or_check(generated_files, __doc__))
