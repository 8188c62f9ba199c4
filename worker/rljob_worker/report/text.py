"""Texts for people."""

from __future__ import annotations


def number(value: float | None, digits: int = 3) -> str:
    """A number, or `-` where there is none (not measured, not finite)."""
    return "-" if value is None else f"{value:.{digits}f}"
