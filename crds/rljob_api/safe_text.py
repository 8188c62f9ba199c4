"""Text that strangers wrote, made safe to show."""

from __future__ import annotations

import unicodedata

_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def visible(text: str) -> str:
    """Escape what a terminal or browser would obey instead of show (control and direction characters).

    Line breaks and tabs stay. Responses, logs and messages may hold anything, and reading it must be safe.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in _HIDDEN else ascii(c)[1:-1] for c in text)
