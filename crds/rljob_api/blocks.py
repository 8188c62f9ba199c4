"""Walking a raw manifest along the types: which field holds which block."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from rljob_api.base import ApiModel

Path = tuple[str | int, ...]


def path_text(path: Path) -> str:
    """Return `spec.data.sources[0].path`; keys that are no field names stand in brackets."""
    text = ""
    for part in path:
        if isinstance(part, str) and re.fullmatch(r"[\w-]+", part):
            text += f".{part}" if text else part
        else:
            text += f"[{part}]"
    return text


def camel_fields(model: type[ApiModel]) -> dict[str, str]:
    """Return camelCase name -> attribute of a block."""
    return {info.alias or name: name for name, info in model.model_fields.items()}


def accepts_null(annotation: Any) -> bool:
    """Tell whether a field may be null."""
    if get_origin(annotation) is Annotated:
        return accepts_null(get_args(annotation)[0])
    return get_origin(annotation) in (Union, UnionType) and NoneType in get_args(annotation)


def block_in(annotation: Any) -> tuple[type[ApiModel] | None, bool]:
    """Return the block type that a field holds, if any, and whether it holds a list of them."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return block_in(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return block_in(next(option for option in get_args(annotation) if option is not NoneType))
    if origin is list:
        return block_in(get_args(annotation)[0])[0], True
    return (annotation, False) if isinstance(annotation, type) and issubclass(annotation, ApiModel) else (None, False)


def without_nulls(model: type[ApiModel], raw: Any) -> Any:
    """Return `raw` without nulls in fields that do not accept them: the API server drops those and puts in defaults."""
    if not isinstance(raw, dict):
        return raw
    kept = {}
    names = camel_fields(model)
    for key, value in raw.items():
        info = model.model_fields.get(names.get(key, ""))
        if info is None:
            kept[key] = value
            continue
        block, many = block_in(info.annotation)
        if value is None and not accepts_null(info.annotation):
            continue
        if block is not None and many and isinstance(value, list):
            value = [without_nulls(block, item) for item in value]
        elif block is not None:
            value = without_nulls(block, value)
        kept[key] = value
    return kept


class Views:
    """Blocks of a raw manifest with snake_case attributes and defaults; what is wrong or missing is left out."""

    def __init__(self, bad: set[Path]) -> None:
        self.bad = bad
        self.found: list[tuple[type[ApiModel], Path, Any]] = []

    def view(self, model: type[ApiModel], raw: dict[str, Any], at: Path) -> SimpleNamespace:
        """Return the view of one block and note it, after those inside it, in `found`."""
        view = SimpleNamespace()
        for alias, name in camel_fields(model).items():
            info = model.model_fields[name]
            path = (*at, alias)
            if path in self.bad:
                continue
            if alias in raw:
                self._set(view, name, info.annotation, raw[alias], path)
            elif not info.is_required():
                setattr(view, name, info.get_default(call_default_factory=True))
        self.found.append((model, at, view))
        return view

    def _set(self, view: SimpleNamespace, name: str, annotation: Any, value: Any, path: Path) -> None:
        block, many = block_in(annotation)
        if block is None or value is None:
            if not any(other[: len(path)] == path for other in self.bad):
                setattr(view, name, value)
        elif many:
            setattr(view, name, [self.view(block, item, (*path, i)) for i, item in self._blocks(value, path)])
        else:
            setattr(view, name, self.view(block, value, path))

    def _blocks(self, values: list[Any], path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        return ((i, item) for i, item in enumerate(values) if (*path, i) not in self.bad)
