"""A cause, and how sentences about it are put together."""

from __future__ import annotations

from dataclasses import dataclass

_LONGEST = 1000


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that keeps a job or a pod from running, or ends an attempt."""

    reason: str
    """One word."""
    message: str
    """Its meaning, or what would change it."""


def cut(text: str, longest: int = _LONGEST) -> str:
    """Text of someone else on one line, without its full stop, at most so long."""
    text = " ".join(text.split()).rstrip(".;: ")
    return text if len(text) <= longest else text[: longest - 3] + "..."


def sentence(*parts: str) -> str:
    """The parts that are not empty, with semicolons between them and a full stop."""
    return "; ".join(part.rstrip(".;: ") for part in parts if part) + "."
