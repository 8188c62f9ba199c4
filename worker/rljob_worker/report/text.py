"""Texts for people."""

from __future__ import annotations

import unicodedata

_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def visible(text: str) -> str:
    """Escape what a terminal or browser would obey instead of show (control and direction characters).

    Line breaks and tabs stay. What a policy writes may hold anything, and reading it must be safe.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in _HIDDEN else ascii(c)[1:-1] for c in text)


def number(value: float | None, digits: int = 3) -> str:
    """A number, or `-` where there is none (not measured, not finite)."""
    return "-" if value is None else f"{value:.{digits}f}"
