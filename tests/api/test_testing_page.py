"""docs/testing.md: the tests and files that it names are there, and each part of the commands around a job has some."""

from __future__ import annotations

import re

import pytest
from support.named_tests import NAMED, ROOT, missing, of_test_faults_alone

PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([A-Z])(?:\. [^|]+)? \| ([^|]+) \| (.+) \|$", PAGE, re.MULTILINE)
"""Part, command and tests of each row."""
ACCEPTED = re.findall(r"^\| (\w+) \| [^|]+ \| ([^|]*`(?:tests|benchmarks)/[^|]+) \| [^|]+ \|$", PAGE, re.MULTILINE)
"""Number of what was asked of episodes, sandboxes and judges, and what shows it."""

HELD = PAGE.split("## What the backends are held to")[1].split("\n## ")[0]
CLAIMS = re.findall(r"^\| ([^|]+) \| (`[^|]+) \|$", HELD, re.MULTILINE)
"""Claim and what proves it."""


def problems(tests: str) -> list[str]:
    """Problems of the tests that a row names; one with a star is of `make test-faults` alone."""
    named = [(match.group(1), match.group(2), tests[match.end() :][:1] == "*") for match in NAMED.finditer(tests)]
    found = [missing(file, test) for file, test, _ in named]
    starred = [
        f"{file}::{test} {'is' if star else 'is not'} marked"
        for file, test, star in named
        if missing(file, test) is None and star != of_test_faults_alone(file, test)
    ]
    return [*filter(None, found), *starred] or ([] if named else ["names no test"])


def test_each_part_has_rows() -> None:
    assert sorted({part for part, _, _ in ROWS}) == list("ABCDEFG")
    assert len(ACCEPTED) >= 13


@pytest.mark.parametrize(("part", "command", "tests"), ROWS)
def test_a_command_has_tests_that_are_there(part: str, command: str, tests: str) -> None:
    assert problems(tests) == [], f"{part}: {command}"


@pytest.mark.parametrize(("claim", "proof"), CLAIMS)
def test_a_claim_has_what_proves_it(claim: str, proof: str) -> None:
    assert [missing(*match.groups()) for match in NAMED.finditer(proof) if missing(*match.groups())] == [], claim
    files = re.findall(r"`((?:tests|benchmarks)/\w[\w/]*\.py)", proof)
    assert files
    assert all((ROOT / file).is_file() for file in files)


def test_every_claim_is_read() -> None:
    assert len(CLAIMS) == sum(line.startswith("| ") for line in HELD.splitlines()) - 1 > 30


@pytest.mark.parametrize(("number", "shown"), ACCEPTED)
def test_what_was_asked_has_tests_or_benchmarks_that_are_there(number: str, shown: str) -> None:
    assert [one for one in problems(shown) if one != "names no test"] == []
    benchmarks = re.findall(r"`(benchmarks/\w+\.py)`", shown)
    assert NAMED.search(shown) or benchmarks or re.search(r"`tests/[\w/]+\.py`", shown)
    assert all((ROOT / one).is_file() for one in benchmarks)


@pytest.mark.parametrize("file", sorted(set(re.findall(r"tests/[\w/]+\.(?:py|yaml|c)\b", PAGE))))
def test_files_are_there(file: str) -> None:
    assert (ROOT / file).is_file()


def test_what_is_wrong_is_seen() -> None:
    here = "tests/api/test_testing_page.py"
    assert problems("none") == ["names no test"]
    assert problems(f"`{here}::test_files_are_there`") == []
    assert problems(f"`{here}::test_nothing`, `tests/none.py::test_x`") == [
        f"{here} has no test_nothing",
        "tests/none.py: there is no such file",
    ]
    assert problems(f"`{here}::test_files_are_there`*") == [f"{here}::test_files_are_there is marked"]
    notebook = "tests/worker/python_api/test_python_api.py::test_the_notebook_runs"
    assert problems(f"`{notebook}`") == [f"{notebook} is not marked"]
    assert problems(f"`{notebook}`*") == []
