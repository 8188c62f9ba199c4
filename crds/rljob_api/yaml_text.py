"""Reading YAML as the Kubernetes API server does."""

from __future__ import annotations

import re
from typing import Any

import yaml


class YamlError(ValueError):
    """Text that is no YAML, with the line."""


class _Loader(yaml.SafeLoader):
    """SafeLoader, with times left as strings, `1e-6` a number, `1:30` a string, and duplicate keys refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            name = self.construct_object(key, deep=True)
            if not isinstance(name, str | int | float | bool):
                raise yaml.constructor.ConstructorError(None, None, "a key is not a scalar", key.start_mark)
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {name!r} is there twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


# kubectl's YAML reads these as booleans, so a name `y` needs quotes.
_Loader.bool_values = {**yaml.SafeLoader.bool_values, "y": True, "n": False}
_REPLACED = {"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float", "tag:yaml.org,2002:int"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^[yYnN]$"), list("yYnN"))
_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9_]+(?:[eE][-+]?[0-9]+)?)$"
    r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
_INT = re.compile(r"^[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))


def parse_yaml(text: str) -> Any:
    """Return the one document in `text`; raise YamlError with the line where it is broken."""
    try:
        documents = [document for document in yaml.load_all(text, Loader=_Loader) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise YamlError(f"{where}{error.problem or error.context or 'not YAML'}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise YamlError(str(error)) from None
    if len(documents) > 1:
        raise YamlError(f"{len(documents)} documents; one is expected")
    return documents[0] if documents else None
