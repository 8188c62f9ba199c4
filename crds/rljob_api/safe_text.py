"""Text that strangers wrote, made safe to show."""

from __future__ import annotations

import json
import unicodedata

_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def visible(text: str) -> str:
    """Escape what a terminal or browser would obey instead of show (control and direction characters).

    Line breaks and tabs stay. Responses, logs and messages may hold anything, and reading it must be safe.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in "\n\t" or not _hidden(c) else ascii(c)[1:-1] for c in text)


def visible_line(text: str) -> str:
    """The same in one line, its line breaks escaped too: for a name or value that stands within a line of ours."""
    return visible(text).replace("\n", "\\n")


def visible_block(text: str, indent: str) -> str:
    """The same with `indent` before all lines but the first, so that none of them passes for a line of ours."""
    return visible(text).replace("\n", f"\n{indent}")


def visible_json(content: object) -> str:
    """Indented JSON in which such characters are JSON's own escapes, and all others are as they are."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    return text if visible(text) == text else "".join(json.dumps(c)[1:-1] if _obeyed(c) else c for c in text)


def other_letters(value: object) -> str:
    """Name the characters of a short text that are not ASCII, which may look like others: ` (holds U+0435 ...)`."""
    if not isinstance(value, str) or value.isascii() or len(value) > 64:
        return ""
    named = dict.fromkeys(f"U+{ord(c):04X} {unicodedata.name(c, '')}".strip() for c in value if not c.isascii())
    return f" (holds {', '.join(list(named)[:3])})"


def _hidden(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN


def _obeyed(character: str) -> bool:
    return character != "\n" and _hidden(character)
