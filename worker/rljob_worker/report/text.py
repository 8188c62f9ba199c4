"""Texts for people."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_api.safe_text import visible, visible_line

_LONGEST = 20_000
_HEAD = 15_000
"""Characters: a longer text is shown by its first and last ones."""


def number(value: float | None, digits: int = 3) -> str:
    """A number, or `-` where there is none (not measured, not finite)."""
    return "-" if value is None else f"{value:.{digits}f}"


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table for a terminal: the first column is of names, the others are of numbers and end together."""
    shown = [list(map(visible_line, row)) for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]).rstrip()
        for row in shown
    ]


def excerpt(text: str) -> str:
    """A text from outside as pages show it: control characters escaped, and without the middle of a very long one."""
    if len(text) > _LONGEST:
        left_out = f"[... {len(text) - _LONGEST:,} characters are not in this page; `rljob samples` shows them ...]"
        text = f"{text[:_HEAD]}\n{left_out}\n{text[_HEAD - _LONGEST :]}"
    return visible(text)
