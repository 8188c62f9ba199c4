"""Schemas of tools: what their arguments are checked by, and calls that fit them. Runs in environment hosts alone."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rljob_worker.data.turns import Schema
from rljob_worker.errors import UserError

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_SAMPLES: Mapping[str, object] = {
    "string": "a", "integer": 1, "number": 0.5, "boolean": True, "array": [], "object": {}, "null": None,
}  # fmt: skip
_COMBINED = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "patternProperties")
"""Keywords by which a schema has properties that are not in its `properties`."""


def validator(schema: Schema, field: str) -> Validator:
    """Checks the arguments of a tool's calls, by the version of JSON Schema that its schema says, or 2020-12.

    Args:
        schema: of the tool.
        field: of the manifest, which begins a message.

    Raises:
        UserError: it is no JSON Schema, or refers to what is not in it; nothing is fetched.
    """
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from jsonschema_specifications import REGISTRY

    name = schema["function"]["name"]
    try:
        # It becomes a text of prompts.
        json.dumps(schema, ensure_ascii=False).encode()
        parameters = _readable(schema["function"]["parameters"])
        kind = validator_for(parameters, default=Draft202012Validator)
        kind.check_schema(parameters)
        made: Validator = kind(_closed(_nullable(parameters)), registry=REGISTRY)
        # What is wrong deeper is found where it is looked at.
        list(made.iter_errors({key: _sample_of(one) for key, one in _properties(parameters).items()}))
    except SchemaError as error:
        place = ".".join(map(str, error.absolute_path)) or "it"
        raise UserError(
            f"{field}: tool {name}: its parameters are no JSON Schema: {place}: {error.message:.300}"
        ) from None
    except RecursionError:
        raise UserError(f"{field}: tool {name}: the JSON Schema of its parameters refers to itself for ever") from None
    except Exception as error:
        raise UserError(
            f"{field}: tool {name}: the JSON Schema of its parameters cannot be used: {type(error).__name__}: "
            f"{error!s:.300}"
        ) from None
    return made


def examples(schemas: Sequence[Schema]) -> Iterator[str]:
    """Calls of tools whose required parameters are all enumerated."""
    for schema in schemas:
        parameters = schema["function"]["parameters"]
        required, properties = parameters.get("required", []), _properties(parameters)
        choices = [properties.get(name, {}).get("enum") or () for name in required]
        if all(choices):
            for values in itertools.product(*choices):
                yield written(schema["function"]["name"], dict(zip(required, values)))


def sample(schema: Schema) -> dict[str, object]:
    """Arguments for what is required, of the kinds that are named; they may not fit further rules of the schema."""
    parameters = schema["function"]["parameters"]
    properties = _properties(parameters)
    return {name: _sample_of(properties.get(name, {})) for name in parameters.get("required", [])}


def written(name: str, arguments: Mapping[str, object]) -> str:
    """A call as `hermes` reads it, with blanks between its arguments alone.

    A tokenizer of words has a word for each of them, so that a policy learns them one by one.
    """
    given = json.dumps(arguments, separators=(", ", ":"), ensure_ascii=False)
    return f'<tool_call>{{"name":{json.dumps(name, ensure_ascii=False)},"arguments":{given}}}</tool_call>'


def _properties(parameters: Schema) -> dict[str, Schema]:
    """Schemas by name; that of one that may be anything (`true`) is empty."""
    return {name: one if isinstance(one, dict) else {} for name, one in parameters.get("properties", {}).items()}


def _sample_of(one: Schema) -> object:
    if one.get("enum"):
        return one["enum"][0]
    kind: Any = one.get("type", "string")
    return _SAMPLES.get(kind[0] if isinstance(kind, list) and kind else str(kind), "a")


def _nullable(schema: Schema) -> Schema:
    """transformers writes OpenAPI's `nullable`, which JSON Schema does not know."""
    if "properties" not in schema:
        return schema
    properties = {
        name: {"anyOf": [value, {"type": "null"}]} if isinstance(value, dict) and value.get("nullable") else value
        for name, value in schema["properties"].items()
    }
    return {**schema, "properties": properties}


def _readable(schema: Any) -> Any:
    """Leave patterns to the server that are of ECMA's regular expressions and none of Python's, like `\\p{L}`."""
    if isinstance(schema, list):
        return [_readable(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _readable(one)
        for key, one in schema.items()
        if not (key == "pattern" and isinstance(one, str) and _is_foreign(one))
    }


def _is_foreign(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return True
    return False


def _closed(schema: Schema) -> Schema:
    """Take no argument of another name, where the schema names all of them and does not say itself what it takes."""
    named = schema.get("properties")
    if named is None or any(key in schema for key in _COMBINED) or not set(schema.get("required", ())) <= set(named):
        return schema
    return {"additionalProperties": False, **schema}
