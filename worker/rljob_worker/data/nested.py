"""Keys like `reward_model.ground_truth`: a value inside a column of mappings, as verl's data sets have it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rljob_worker.data.rows import Row

if TYPE_CHECKING:
    import pyarrow as pa


def lift(row: Row, keys: Iterable[str | None]) -> None:
    """Give a row a column for each key that names a value inside one; a column of that very name wins."""
    for key in keys:
        if key is None or "." not in key or key in row:
            continue
        found = value_at(row, key)
        if found is not None:
            row[key] = found


def value_at(row: Row, key: str) -> object:
    """The value of a column, or of a field within one; None where there is none."""
    if key in row:
        return row[key]
    found: object = row
    for name in key.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def lifted(table: pa.Table, keys: Iterable[str | None]) -> pa.Table:
    """The same for a table with columns of structs."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for key in keys:
        if key is None or "." not in key or key in table.column_names:
            continue
        column, *inner = key.split(".")
        kind = table.schema.field(column).type if table.column_names.count(column) == 1 else None
        for name in inner:
            if kind is not None:
                there = pa.types.is_struct(kind) and kind.get_field_index(name) >= 0
                kind = kind.field(name).type if there else None
        if kind is not None:
            table = table.append_column(key, pc.struct_field(table[column], inner))
    return table


def without_views(table: pa.Table) -> pa.Table:
    """The table with texts and bytes of the usual types in the place of views, which few functions of Arrow take."""
    import pyarrow as pa

    plain = pa.schema([field.with_type(_plain(field.type)) for field in table.schema], table.schema.metadata)
    return table if plain.equals(table.schema) else table.cast(plain)


def _plain(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    return kind
