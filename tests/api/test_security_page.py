"""Each attack that docs/security.md lists names the test that carries it out."""

from __future__ import annotations

import re

import pytest
from support.named_tests import NAMED, ROOT, missing

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def attacks(page: str) -> list[str]:
    """The rows of the tables whose first column is called Attack."""
    tables = re.findall(r"^\| Attack \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    return [row for table in tables for row in table.splitlines()]


def problem(row: str) -> str | None:
    """Problem of a row's last cell."""
    named = NAMED.fullmatch(row.rstrip("| ").rpartition("| ")[2])
    if named is None:
        return "names no test as path::test"
    return missing(*named.groups())


def test_there_are_many() -> None:
    assert len(attacks(PAGE)) >= 19


@pytest.mark.parametrize("row", attacks(PAGE), ids=lambda row: row.split("|")[1].strip()[:50])
def test_an_attack_names_its_test(row: str) -> None:
    assert problem(row) is None


@pytest.mark.parametrize(("file", "test"), NAMED.findall(PAGE))
def test_what_is_named_elsewhere_is_there_too(file: str, test: str) -> None:
    assert problem(f"| x | `{file}::{test}` |") is None


def test_what_is_wrong_is_seen() -> None:
    here = "tests/api/test_security_page.py"
    assert problem("| a | b | refused |") == "names no test as path::test"
    assert problem(f"| a | `{here}::test_nothing` |") == f"{here} has no test_nothing"
    assert problem("| a | `tests/none.py::test_x` |") == "tests/none.py: there is no such file"
    assert problem(f"| a | `{here}::test_there_are_many` |") is None
