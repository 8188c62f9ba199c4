"""Text of other programs, made fit for the status."""

from __future__ import annotations

import hashlib
import re

MESSAGE_LIMIT = 2000
LINE_LIMIT = 500
LINES_OF_LAST = 50
LINES_OF_EARLIER = 10
"""Ten attempts with 50 long lines each would not fit into an object of etcd (1.5 MiB)."""


def clean(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """Text without control characters and half surrogate pairs, cut to the limit with an ellipsis."""
    text = text.encode("utf-8", "replace").decode()
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f\u2028\u2029]", " ", text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def reason_word(text: str, default: str) -> str:
    """The text as a condition's reason: one word that begins with a letter."""
    word = re.sub(r"[^A-Za-z0-9_]", "", text)[:100].lstrip("0123456789_")
    return word or default


def short_value(text: str) -> str:
    """The text itself, or a digest of it where it is long; never empty."""
    text = clean(text, len(text) + 1)
    if 0 < len(text) <= 200:
        return text
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
