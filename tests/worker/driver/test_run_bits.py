"""The rows that are compared bit for bit are manifests, and a difference is seen."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import yaml
from support.run_bits import ROWS, Rows, is_other, laid_over, read_table, table_line

from rljob_api.validation import check_runnable_locally, load_manifest

NAMES = list(yaml.safe_load(ROWS.read_text())["rows"])


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_a_job_that_runs_here(name: str, tmp_path: Path) -> None:
    check_runnable_locally(load_manifest(Rows(tmp_path).manifest(name)))


def test_a_row_is_laid_over_the_base() -> None:
    base = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert laid_over(base, {"a": {"c": {"d": 4}, "f": 5}, "e": None}) == {"a": {"b": 1, "c": {"d": 4}, "f": 5}}
    assert base == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}


@pytest.mark.parametrize(
    ("line", "other"),
    [
        (table_line("tail", {"steps": "a1", "driver": "b2"}), False),
        (table_line("tail", {"steps": "a1", "driver": "b3"}), True),
        (table_line("tail", {"steps": "a1"}), True),
        (table_line("new", {"steps": "a1"}), True),
    ],
)
def test_a_digest_that_differs_is_seen(line: str, other: bool, tmp_path: Path) -> None:
    table = tmp_path / "bits.txt"
    table.write_text(table_line("tail", {"steps": "a1", "driver": "b2"}) + "\n")
    arguments = argparse.Namespace(against=table, write=None)
    assert is_other(line, read_table(table), arguments) is other
