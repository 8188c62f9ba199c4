"""The CRD and the reference in the repository are what the types say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from support import pod_fields

from rljob_api.generate import generated_files, write_or_check

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return generated_files()


def test_committed_files_equal_the_types(files: dict[str, str]) -> None:
    stale = [name for name, content in files.items() if (ROOT / name).read_text(encoding="utf-8") != content]
    assert stale == [], "run `python -m rljob_api.generate`"


def test_fields_of_pods_are_those_of_the_client() -> None:
    for name, content in pod_fields.generated_files().items():
        assert (ROOT / name).read_text(encoding="utf-8") == content, f"{name} is stale: run `make generate`"


def test_check_tells_stale_files(tmp_path: Path, files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> int:
        return write_or_check(lambda: files, None, arguments, tmp_path)

    assert run("--check") == 1
    assert not list(tmp_path.iterdir())
    assert run() == 0
    assert run("--check") == 0
    (tmp_path / "docs/reference.md").write_text("old")
    capsys.readouterr()
    assert run("--check") == 1
    assert capsys.readouterr().out == "docs/reference.md: out of date; `make generate` writes it anew\n"


def test_crd_is_plain_yaml(files: dict[str, str]) -> None:
    text = files["crds/rljob.dev_rljobs.yaml"]
    assert "&id" not in text
    document = yaml.safe_load(text)
    assert document["kind"] == "CustomResourceDefinition"
    applied = json.dumps(document, separators=(",", ":"))
    assert len(applied) < 261_000, "kubectl apply keeps what it applied, as JSON: all annotations have at most 262,144"


def test_reference_has_every_field_and_its_links_lead_somewhere(files: dict[str, str]) -> None:
    text = files["docs/reference.md"]
    anchors = {
        re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", text, re.M)
    }
    links = set(re.findall(r"\]\(#([\w-]+)\)", text))
    assert links
    assert links <= anchors
    for field in ("samplesPerPrompt", "tensorParallel", "trainMemoryMargin", "lastCheckpoint", "phaseSeconds"):
        assert f"| `{field}` |" in text
