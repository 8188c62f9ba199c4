"""Tests that a page names as `path::test`."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
_ONLY_ALL = "unless_all"
"""Decorator of tests that `make test-faults` alone runs."""


def missing(file: str, test: str, root: Path = ROOT) -> str | None:
    """Problem of a name, or None where the file has the test."""
    if not (root / file).is_file():
        return f"{file}: there is no such file"
    return None if _definition(file, test, root) else f"{file} has no {test}"


def of_test_faults_alone(file: str, test: str, root: Path = ROOT) -> bool:
    """Is the test skipped by `make test`?"""
    found = _definition(file, test, root)
    return found is not None and f"@{_ONLY_ALL}(" in found[0]


def _definition(file: str, test: str, root: Path) -> re.Match[str] | None:
    text = (root / file).read_text(encoding="utf-8")
    return re.search(rf"^(?:@.*\n(?:[ \t)\]].*\n)*)*(?:async )?def {test}\(", text, re.MULTILINE)
