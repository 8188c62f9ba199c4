"""A number with its noun, for messages."""

from __future__ import annotations


def how_many(count: int, one: str, several: str | None = None) -> str:
    """Return `1 step` or `3 steps`.

    `several` is the form for every number but 1, for a noun whose plural is not `one` with an s, or for a noun with
    its verb: `how_many(count, "row is", "rows are")`.
    """
    return f"{count} {one if count == 1 else several or f'{one}s'}"


def all_of(count: int, one: str, several: str | None = None) -> str:
    """Return `the only step` or `all 3 steps`, with the same forms."""
    return f"the only {one}" if count == 1 else f"all {how_many(count, one, several)}"
