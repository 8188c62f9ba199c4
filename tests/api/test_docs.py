"""The pages can be followed: links, fields of the manifest, and manifests written out in them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from rljob_api.algorithms import ALGORITHMS
from rljob_api.crd import custom_resource_definition
from rljob_api.validation import load_manifest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "examples", "helm", "images", "benchmarks")
WITH_FIELDS = (ROOT, ROOT / "docs", ROOT / "docs/zh")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([\w./#:%?=&~@+-]+)\)")
FIELD = re.compile(r"(?:spec\.)?([a-z][A-Za-z]*(?:\[\])?(?:\.[A-Za-z]+(?:\[\])?)+)(?:: .*)?")
FILES = {"jsonl", "safetensors", "py", "yaml", "json", "damaged"}
"""Suffixes of files that are called as a block of the manifest is, such as `steps.jsonl`."""


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.add(slug if slug not in found else f"{slug}-1")
    return found


def broken(page: Path, text: str) -> list[str]:
    """The relative links of a page that lead nowhere."""
    found = []
    for target in LINK.findall(CODE.sub("", FENCE.sub("", text))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert broken(page, page.read_text(encoding="utf-8")) == []


def test_links_that_lead_nowhere_are_noticed() -> None:
    text = "[a](README.md) [b](no-such.md) [c](docs/glossary.md#jobs) [d](docs/glossary.md#no-such)\n`[e](none.md)`"
    assert broken(ROOT / "README.md", text) == ["no-such.md", "docs/glossary.md#no-such"]


def test_the_index_names_every_page_of_docs() -> None:
    index = ROOT / "docs/README.md"
    targets = LINK.findall(index.read_text(encoding="utf-8"))
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in targets}
    assert [name(page) for page in PAGES if page.parent == index.parent and page not in {*linked, index}] == []


@cache
def schema() -> dict[str, Any]:
    """The schema of `spec`."""
    version = custom_resource_definition()["spec"]["versions"][0]
    spec: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return spec


def exists(path: str) -> bool:
    """Whether there is such a field, of which what lies below free-form mappings may be anything."""
    node = schema()
    for part in path.replace("[]", "").split("."):
        node = node.get("items", node)
        if "properties" not in node:
            return bool(node.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in node)
        if part not in node["properties"]:
            return False
        node = node["properties"][part]
    return True


def fields(text: str) -> set[str]:
    """The code spans that are a path below a block of `spec`, such as `rollout.topP` or `rollout.topP: 0.9`."""
    paths = {span[1] for span in map(FIELD.fullmatch, CODE.findall(FENCE.sub("", text))) if span}
    roots = schema()["properties"]
    return {path for path in paths if re.split(r"\W", path)[0] in roots and path.split(".")[-1] not in FILES}


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent in WITH_FIELDS], ids=name)
def test_fields_exist(page: Path) -> None:
    named = fields(page.read_text(encoding="utf-8"))
    assert sorted(path for path in named if not exists(path)) == []


def test_fields_that_do_not_exist_are_noticed() -> None:
    named = fields("`rollout.topP` `rollout.nucleus` `data.sources[].weight: 3` `spec.hccl.port` `trainer.py`")
    assert {path for path in named if exists(path)} == {"rollout.topP", "data.sources[].weight"}
    assert {path for path in named if not exists(path)} == {"rollout.nucleus", "hccl.port"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_manifests_in_pages_are_valid(page: Path, tmp_path: Path) -> None:
    """A whole manifest in a page can be copied out of it and is one."""
    for block in re.findall(r"^```yaml\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        if "kind: RLJob\n" not in block:
            continue
        file = tmp_path / "job.yaml"
        file.write_text(block, encoding="utf-8")
        assert load_manifest(file).metadata.name, yaml.safe_load(block)


def test_each_algorithm_has_an_example_that_is_a_job(tmp_path: Path) -> None:
    quickstart = (ROOT / "examples/quickstart.yaml").read_text(encoding="utf-8")
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    named = []
    for block in re.findall(r"^```yaml\n(algorithm:.*?)^```$", page, re.MULTILINE | re.DOTALL):
        document, example = yaml.safe_load(quickstart), yaml.safe_load(block)
        for field, value in example.items():
            document["spec"][field] = {**document["spec"].get(field, {}), **value}
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(document), encoding="utf-8")
        named.append(str(load_manifest(file).spec.algorithm.name))
    assert set(named) == set(ALGORITHMS)


def test_settings_of_other_frameworks_have_fields_that_exist() -> None:
    """The last column of each table: a field, or none or always with the reason."""
    page = (ROOT / "docs/from-other-frameworks.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| slime, vime \| verl \| here \|\n\|---.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    cells = [row.strip("| \n").rsplit(" | ", 1)[-1] for table in tables for row in table.splitlines()]
    assert len(cells) > 70
    for cell in cells:
        if not re.match(r"none: |always", cell):
            first = re.match(r"`(rljob run [a-z-]+|[A-Za-z.\[\]]+)", cell)
            assert first, cell
            assert first[1].startswith("rljob") or exists(first[1]), cell
