"""The rows of an Arrow table, whose prompts and labels were looked at in all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import xxhash

from rljob_api.spec import DataSource
from rljob_worker.data.labels import label_text
from rljob_worker.data.nested import lifted
from rljob_worker.data.prompts import check_prompt
from rljob_worker.data.rows import Row, RowFacts
from rljob_worker.errors import UserError
from rljob_worker.types import IntArray

if TYPE_CHECKING:
    import pyarrow as pa

_CHUNK = 1024
_MAYBE_MESSAGES = r'^\s*["\[{]'


class TableRows(Sequence[Row]):
    """The rows of an Arrow table, made into Python objects one at a time, as they are asked for.

    Raises:
        UserError: a column is absent, or a row's prompt or label cannot be used; names column and row.
    """

    def __init__(self, table: pa.Table, origin: str, source: DataSource, field: str):
        self._given = table
        self._table = lifted(table, (source.prompt_key, source.label_key))
        self._origin, self._source, self._field = origin, source, field
        self.facts = RowFacts()
        for name, key in (("promptKey", source.prompt_key), ("labelKey", source.label_key)):
            if key is not None:
                self._check_column(name, key)
        self._check_text()
        self._check_prompts()
        if source.label_key is not None:
            self._check_labels(source.label_key)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._table.slice(index % len(self), 1).to_pylist()[0]

    def __iter__(self) -> Iterator[Row]:
        for batch in self._table.to_batches(max_chunksize=_CHUNK):
            yield from batch.to_pylist()

    @property
    def names(self) -> frozenset[str]:
        """The columns, with those that a key lifted out of another."""
        return frozenset(self._table.column_names)

    def has(self, key: str) -> bool:
        """Whether there is a column, or a field within one, of that name."""
        return key in lifted(self._table, (key,)).column_names

    def values(self, key: str | None, count: int) -> Iterator[Any]:
        """Values of a column, or of a field within one, in the first rows; None where there is none."""
        table = lifted(self._table, (key,))
        if key is None or key not in table.column_names:
            yield from repeat(None, min(count, len(self)))
            return
        for batch in table.select([key]).slice(0, count).to_batches(max_chunksize=_CHUNK):
            yield from batch.column(0).to_pylist()

    def fingerprint(self) -> str:
        """Hash of the content, in the column order that the table has."""
        digest = xxhash.xxh3_128(repr(self._given.column_names).encode())
        for batch in self._given.to_batches(max_chunksize=_CHUNK):
            digest.update(batch.serialize())
        return digest.hexdigest()

    def hashes(self) -> IntArray:
        """[rows] hashes of each row's values, by the names of their columns."""
        found = (xxhash.xxh3_64_intdigest(repr(sorted(row.items())).encode("utf-8", "surrogatepass")) for row in self)
        return np.fromiter(found, dtype=np.uint64, count=len(self)).view(np.int64)

    def _place(self, row: int) -> str:
        return f"{self._origin}, row {row}"

    def _check_column(self, name: str, key: str) -> None:
        """That it is there once and has no nulls; what has no text of its own kind is made into one that has."""
        import pyarrow as pa
        import pyarrow.compute as pc

        names = self._table.column_names
        where = f"column {key!r} ({self._field}.{name})"
        if names.count(key) != 1:
            state = f"is there {names.count(key)} times" if key in names else "is absent"
            outer = key.partition(".")[0]
            if names.count(outer) == 1 and pa.types.is_map(self._table.schema.field(outer).type):
                state += f": {outer!r} is a map, whose keys are no fields (a struct has fields)"
            raise UserError(f"{self._origin}: {where} {state}; the columns there are: {', '.join(map(repr, names))}")
        column = self._table[key]
        if column.null_count:
            raise UserError(f"{self._place(column.is_null().index(True).as_py())}: {where} is null")
        kind = column.type
        if pa.types.is_dictionary(kind):
            column = column.cast(kind.value_type)
            kind = kind.value_type
        if isinstance(kind, pa.BaseExtensionType) and _is_text(kind.storage_type):
            # Text that is said to be JSON, for one.
            column = column.cast(kind.storage_type)
            kind = kind.storage_type
        if _is_binary(kind):
            column = self._decoded(column, where)
        elif pa.types.is_float16(kind) or pa.types.is_float32(kind):
            # Its own digits: 0.1 in 32 bits is another number in 64.
            column = pc.cast(pc.cast(pc.cast(column, pa.float32()), pa.string()), pa.float64())
        if column is not self._table[key]:
            self._table = self._table.set_column(names.index(key), key, column)

    def _decoded(self, column: pa.ChunkedArray, where: str) -> pa.ChunkedArray:
        import pyarrow as pa

        try:
            return column.cast(pa.large_binary()).cast(pa.large_string())
        except pa.ArrowInvalid:
            row = next(row for row, value in enumerate(column.to_pylist()) if _fails_as_text(value))
            raise UserError(f"{self._place(row)}: {where} is bytes that are not UTF-8") from None

    def _check_text(self) -> None:
        """Parquet says that a column is text; nobody has looked at its bytes."""
        import pyarrow as pa

        for name in self._table.column_names:
            try:
                self._table[name].validate(full=True)
            except pa.ArrowInvalid as error:
                raise UserError(f"{self._origin}: column {name!r} is damaged, or no UTF-8: {error}") from None
            if _has_times(self._table.schema.field(name).type):
                self._check_times(name)

    def _check_times(self, name: str) -> None:
        """Arrow has times that Python has not: of the year 20000, of as many years, or in a zone that this machine
        does not know."""
        import pyarrow as pa
        import pyarrow.compute as pc

        column = self._table[name]
        try:
            is_listed = pa.types.is_nested, pa.types.is_dictionary, pa.types.is_duration
            if any(is_one(column.type) for is_one in is_listed):
                column.to_pylist()
            else:
                pc.min_max(column).as_py()
        except (OverflowError, ValueError, LookupError) as error:
            raise UserError(
                f"{self._origin}: column {name!r} ({column.type}) has a time that Python does not: {error}; leave the "
                "column out, or write it as text"
            ) from None

    def _check_prompts(self) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        key = self._source.prompt_key
        column = self._table[key]
        if _is_text(column.type):
            empty = pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(column)), 0)
            unclear = pc.or_(empty, pc.match_substring_regex(column, _MAYBE_MESSAGES))
            for row in np.flatnonzero(unclear.to_numpy()).tolist():
                self._check_prompt(column[row].as_py(), row)
            return
        kind = column.type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            raise UserError(
                f"{self._origin}: column {key!r} ({self._field}.promptKey) is {kind}: a string or a list of "
                "chat messages is needed"
            )
        row = 0
        for chunk in column.chunks:
            for start in range(0, len(chunk), _CHUNK):
                for prompt in chunk.slice(start, _CHUNK).to_pylist():
                    self._check_prompt(prompt, row)
                    row += 1

    def _check_prompt(self, prompt: Any, row: int) -> None:
        place = self._place(row)
        self.facts.note_messages(check_prompt(prompt, place, self._field, self._source), place)

    def _check_labels(self, key: str) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        column, kind = self._table[key], self._table[key].type
        suspects: Any = range(len(column))
        if _is_text(kind):
            blank = pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(column)), 0)
            suspects = np.flatnonzero(blank.to_numpy()).tolist()[:1]
        elif pa.types.is_floating(kind):
            suspects = np.flatnonzero(~pc.is_finite(column).to_numpy()).tolist()[:1]
        elif not pa.types.is_nested(kind):
            # All values of a column that is no list have one type.
            suspects = range(min(1, len(column)))
        for row in suspects:
            place = self._place(row)
            try:
                text = label_text(column[row].as_py())
            except ValueError as error:
                raise UserError(f"{place}: the label ({key!r}, {self._field}.labelKey) {error}") from None
            self.facts.note_label(text, place)


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _has_times(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _has_times(kind.value_type)
    if pa.types.is_nested(kind):
        return any(_has_times(kind.field(index).type) for index in range(kind.num_fields))
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_duration(kind))


def _is_binary(kind: pa.DataType) -> bool:
    import pyarrow as pa

    named = pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view
    return any(is_one(kind) for is_one in named)


def _fails_as_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return True
    return False
