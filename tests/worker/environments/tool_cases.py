"""Tools of tests: good ones, and one for each thing that is refused."""

from __future__ import annotations

import time
from typing import Literal


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def put(shelf: Literal["a", "b"], place: Literal[1, 2]) -> str:
    """Put something away.

    Args:
        shelf: The shelf.
        place: The place on it.
    """
    return f"{shelf}{place}"


async def later(word: str) -> dict[str, str]:
    """Say a word after a while.

    Args:
        word: It.
    """
    return {"said": word}


def fails(word: str) -> str:
    """Raise.

    Args:
        word: Anything.
    """
    raise RuntimeError(f"no {word} here")


def hangs() -> str:
    """Never come back."""
    time.sleep(600)
    return ""


def rubbish() -> object:
    """Return what is no text."""
    return object()


class Counter:
    """Counts its calls, from what the row has."""

    def reset(self, start: int, **row: object) -> None:
        self.value = start

    def more(self, by: Literal[1, 10]) -> str:
        """Count on.

        Args:
            by: How much.
        """
        self.value += by
        return str(self.value)


class Talks:
    """Its reset says something."""

    def reset(self, **row: object) -> str:
        return "hello"

    def nothing(self) -> str:
        """Do nothing."""
        return ""


class Empty:
    """Has no tools."""


def unhinted(a) -> int:  # type: ignore[no-untyped-def]
    """Have no hint.

    Args:
        a: Anything.
    """
    return 1


def undescribed(a: int) -> int:
    """Describe nothing."""
    return a


def silent(a: int) -> int:
    return a


def starred(*words: str) -> str:
    """Take any number of words.

    Args:
        words: They.
    """
    return ""


number = 3
