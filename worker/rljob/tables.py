"""Tables: columns by name, of plain values."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rljob_api.safe_text import visible

if TYPE_CHECKING:
    import pandas

_SHOWN_ROWS = 20
_SHOWN_CHARACTERS = 200


class Table:
    """Rows of equal columns. A value that a row lacks is None.

    Args:
        rows: each a mapping of column to value; columns stand in the order in which they first occur.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        names = dict.fromkeys(name for row in rows for name in row)
        self._columns: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in names}
        self._length = len(rows)

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self._columns)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, column: str) -> list[Any]:
        """The values of a column; KeyError names those that there are."""
        try:
            return self._columns[column]
        except KeyError:
            raise KeyError(f"no column {column!r}; there are {', '.join(self._columns)}") from None

    def __contains__(self, column: object) -> bool:
        return column in self._columns

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows."""
        for index in range(self._length):
            yield {name: values[index] for name, values in self._columns.items()}

    def to_dict(self) -> dict[str, list[Any]]:
        """Column -> values, as pandas, polars and pyarrow take it."""
        return {name: list(values) for name, values in self._columns.items()}

    def to_pandas(self) -> pandas.DataFrame:
        """A data frame; ImportError where pandas is not installed."""
        import pandas

        return pandas.DataFrame(self._columns)

    def __repr__(self) -> str:
        return f"<Table of {self._length} rows: {', '.join(self._columns)}>"

    def _repr_html_(self) -> str:
        """The first rows, as a notebook shows them: texts are shown, none obeyed."""
        head = "".join(f"<th>{_cell(name)}</th>" for name in self._columns)
        rows = [
            "<tr>" + "".join(f"<td>{_cell(values[index])}</td>" for values in self._columns.values()) + "</tr>"
            for index in range(min(self._length, _SHOWN_ROWS))
        ]
        more = f"<p>{self._length - _SHOWN_ROWS} more rows</p>" if self._length > _SHOWN_ROWS else ""
        return f"<table><tr>{head}</tr>{''.join(rows)}</table>{more}"


def _cell(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if len(text) > _SHOWN_CHARACTERS:
        text = text[:_SHOWN_CHARACTERS] + " ..."
    return html.escape(visible(text))
