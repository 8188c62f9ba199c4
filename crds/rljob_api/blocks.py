"""Walking a raw manifest along the types: which field holds which block."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from rljob_api.base import ApiModel

Path = tuple[str | int, ...]


def path_text(path: Path) -> str:
    """Return `spec.data.sources[0].path`; keys that are no field names stand in brackets."""
    text = ""
    for part in path:
        if isinstance(part, str) and re.fullmatch("[A-Za-z0-9_-]{1,60}", part):
            text += f".{part}" if text else part
        else:
            shown = str(part)
            text += f"[{shown if len(shown) <= 60 and shown.isprintable() else repr(shown[:57] + '...')}]"
    return text


@dataclass(frozen=True, slots=True)
class BlockField:
    """A field of a block, as its type says."""

    name: str
    """The attribute; the manifest has it in camelCase."""
    info: FieldInfo
    block: type[ApiModel] | None
    """The block type that it holds, if any."""
    many: bool
    """It holds a list."""
    nullable: bool


@functools.cache
def fields_of(model: type[ApiModel]) -> Mapping[str, BlockField]:
    """Return the fields of a block by their camelCase names."""
    table = {}
    for name, info in model.model_fields.items():
        block, many = _block_in(info.annotation)
        table[info.alias or name] = BlockField(name, info, block, many, _accepts_null(info.annotation))
    return MappingProxyType(table)


def _accepts_null(annotation: Any) -> bool:
    if get_origin(annotation) is Annotated:
        return _accepts_null(get_args(annotation)[0])
    return get_origin(annotation) in (Union, UnionType) and NoneType in get_args(annotation)


def _block_in(annotation: Any) -> tuple[type[ApiModel] | None, bool]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _block_in(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return _block_in(next(option for option in get_args(annotation) if option is not NoneType))
    if origin is list:
        return _block_in(get_args(annotation)[0])[0], True
    return (annotation, False) if isinstance(annotation, type) and issubclass(annotation, ApiModel) else (None, False)


def without_nulls(model: type[ApiModel], raw: Any) -> Any:
    """Return `raw` without nulls in fields that do not accept them: the API server drops those and puts in defaults."""
    if not isinstance(raw, dict):
        return raw
    kept = {}
    fields = fields_of(model)
    for key, value in raw.items():
        field = fields.get(key)
        if field is not None:
            if value is None and not field.nullable:
                continue
            if field.block is not None and field.many and isinstance(value, list):
                value = [without_nulls(field.block, item) for item in value]
            elif field.block is not None:
                value = without_nulls(field.block, value)
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
        for alias, field in fields_of(model).items():
            path = (*at, alias)
            if path in self.bad:
                continue
            if alias in raw:
                self._set(view, field, raw[alias], path)
            elif field.info.default_factory is None and not field.info.is_required():
                # The default itself, no copy: blocks are frozen, and no check writes into a mapping.
                setattr(view, field.name, field.info.default)
            elif not field.info.is_required():
                setattr(view, field.name, field.info.get_default(call_default_factory=True, validated_data=vars(view)))
        self.found.append((model, at, view))
        return view

    def _set(self, view: SimpleNamespace, field: BlockField, value: Any, path: Path) -> None:
        if field.block is None or value is None:
            if not any(other[: len(path)] == path for other in self.bad):
                setattr(view, field.name, value)
        elif field.many:
            setattr(
                view, field.name, [self.view(field.block, item, (*path, i)) for i, item in self._blocks(value, path)]
            )
        else:
            setattr(view, field.name, self.view(field.block, value, path))

    def _blocks(self, values: list[Any], path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        return ((i, item) for i, item in enumerate(values) if (*path, i) not in self.bad)
