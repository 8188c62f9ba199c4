"""docs/comparison.md: each project that it names has a source, and each source has a date."""

from __future__ import annotations

import re

import pytest
from support.named_tests import ROOT

PAGE = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
CLAIMS, SOURCES = PAGE.split("\n## Sources\n")
ROWS = {
    key: (source, state)
    for key, source, state in re.findall(r"^\| ([A-Z]\d?) \| (.+) \| ([^|]+) \|$", SOURCES, re.MULTILINE)
}
PROJECTS = (
    "verl", "vime", "slime", "ROLL", "Relax", "ms-swift", "NeMo-RL", "TRL", "SkyRL", "miles", "prime-rl", "OpenRL",
    "KubeRay", "Kubeflow Trainer", "llm-d-rl-time-slicing", "agent-sandbox",
)  # fmt: skip
TABLES = re.findall(r"^\| (?!-)(.+?) \| (.+) \|$", CLAIMS, re.MULTILINE)


def named(text: str) -> list[str]:
    """Projects that a text names."""
    return [project for project in PROJECTS if re.search(rf"(?<![\w-]){re.escape(project)}(?![\w-])", text)]


@pytest.mark.parametrize("project", PROJECTS)
def test_each_project_has_a_source_with_a_date(project: str) -> None:
    assert project in named(CLAIMS)
    rows = [state for source, state in ROWS.values() if project in named(source)]
    assert rows, "no row of the sources names it"
    assert re.search(r"20\d\d", rows[0]), rows[0]


def test_numbers_are_of_sources_with_dates_and_each_is_referred_to() -> None:
    numbers = {one for group in re.findall(r"\[([A-Z]\d?(?:, [A-Z]\d?)*)\]", CLAIMS) for one in group.split(", ")}
    assert numbers - ROWS.keys() == set()
    without = {key for key, (source, _) in ROWS.items() if not named(source)}
    assert without - numbers == set()
    assert [key for key, (_, state) in ROWS.items() if not re.search(r"20\d\d", state)] == []


def test_what_rljob_lacks_was_found_somewhere() -> None:
    lacks = re.search(r"^## What RLJob lacks\n(.+?)^## ", CLAIMS, re.MULTILINE | re.DOTALL)
    assert lacks is not None
    rows = [(feature, found) for feature, found in TABLES if f"| {feature} | {found} |" in lacks[1]][1:]
    assert len(rows) >= 15
    assert [feature for feature, found in rows if not named(found)] == []
    assert [feature for feature, _ in rows if "RLJob has both" in feature] == []
