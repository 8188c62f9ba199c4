"""A fault: a text that stands exactly once in a file, its replacement, and tests that pass without it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One fault; `tests` are arguments of pytest."""

    name: str
    file: str
    old: str
    new: str
    tests: str
