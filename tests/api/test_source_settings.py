"""Every setting of the published set-ups has a row in docs/source-settings.md, and every field that it names exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from rljob_api.crd import custom_resource_definition

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/source-settings.md").read_text(encoding="utf-8")
SOURCES: dict[str, dict[str, list[str]]] = yaml.safe_load(
    (Path(__file__).parent / "source_settings.yaml").read_text(encoding="utf-8")
)
NAMES = {source: [name for names in kinds.values() for name in names] for source, kinds in SOURCES.items()}


class Row(NamedTuple):
    """One line of the tables."""

    settings: list[str]
    sources: list[str]
    here: str
    why: str


def rows() -> list[Row]:
    found = []
    for line in PAGE.splitlines():
        if not line.startswith("| `"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 4, line
        found.append(Row(re.findall(r"`([^`]+)`", cells[0]), cells[1].split(", "), cells[2], cells[3]))
    return found


ROWS = rows()


def exists(path: str) -> bool:
    """Whether the API server's schema has a field below `spec`."""
    versions = custom_resource_definition()["spec"]["versions"]
    node: dict[str, Any] = versions[0]["schema"]["openAPIV3Schema"]
    for part in path.split("."):
        node = node.get("properties", {}).get(part.removesuffix("[]"))
        if node is None:
            return False
        if part.endswith("[]"):
            node = node["items"]
    return True


@pytest.mark.parametrize(("source", "name"), [(source, name) for source, names in NAMES.items() for name in names])
def test_setting_has_one_row_that_names_its_source(source: str, name: str) -> None:
    found = [row for row in ROWS if name in row.settings]
    assert len(found) == 1, f"{name} has {len(found)} rows in docs/source-settings.md"
    assert source in found[0].sources, f"the row of {name} does not say that {source} has it"


def test_rows_name_nothing_that_no_source_has() -> None:
    for row in ROWS:
        assert row.settings
        for source in row.sources:
            assert set(row.settings) & set(NAMES[source]), f"{row.settings}: {source} has none of them"
        for name in row.settings:
            assert any(name in NAMES[source] for source in row.sources), name


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(spec\.[A-Za-z.\[\]]+)`", PAGE))))
def test_field_exists(path: str) -> None:
    assert exists(path)


def test_what_has_no_field_says_why() -> None:
    """A row is a field, a value that is always set, or nothing; the last with its reason."""
    for row in ROWS:
        assert re.match(r"`spec\.|none\b|always\b", row.here), row.here
        if row.here.startswith("none"):
            assert row.why, row.settings


def test_a_field_that_does_not_exist_is_noticed() -> None:
    assert exists("spec.data.sources[].weight")
    assert not exists("spec.data.sources[].share")
    assert not exists("spec.noSuchField")
