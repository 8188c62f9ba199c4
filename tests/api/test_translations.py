"""The Chinese pages have the commands and the structure of the English pages that they translate."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import translations
from support.translations import FOLDER, ROOT, SOURCES, digest, findings, main

ENGLISH = "# Page\n\nRun `rljob plan`.\n\n```\nrljob plan JOB.yaml   # look\n```\n"
CHINESE = "# 页面\n\n运行 `rljob plan`。\n\n```\nrljob plan JOB.yaml   # 先看一看\n```\n"


def first_line(english: str = ENGLISH) -> str:
    return f"<!-- translates docs/page.md sha256:{digest(english)} -->\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one English page and its translation."""
    monkeypatch.setattr(translations, "SOURCES", {"page.md": "docs/page.md"})
    (tmp_path / FOLDER).mkdir(parents=True)
    (tmp_path / "docs/page.md").write_text(ENGLISH, encoding="utf-8")
    (tmp_path / FOLDER / "page.md").write_text(first_line() + CHINESE, encoding="utf-8")
    return tmp_path


def test_pages_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    status = main([])
    with capsys.disabled():
        print(f"\n{capsys.readouterr().out}", end="")
    assert status == 0, "python tests/support/translations.py says what is broken"


@pytest.mark.parametrize(("name", "source"), SOURCES.items())
def test_pages_link_to_each_other(name: str, source: str) -> None:
    chinese, english = ROOT / FOLDER / name, ROOT / source
    for page, other in ((chinese, english), (english, chinese)):
        targets = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
        assert other in [(page.parent / target).resolve() for target in targets], page


def test_words_that_the_terms_reject_are_in_no_page() -> None:
    terms = (ROOT / FOLDER / "translating.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| ([^|]+) \|$", terms, re.MULTILINE)
    rejected = {word for _, words in rows[2:] for word in words.strip().split("、") if word.strip()}
    assert len(rejected) > 10
    for name in SOURCES:
        text = (ROOT / FOLDER / name).read_text(encoding="utf-8")
        assert [word for word in rejected if word in text] == [], name


def test_a_whole_page_has_no_finding(root: Path) -> None:
    assert findings(root) == []


def test_a_page_older_than_the_english_one_is_named_and_passes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "docs/page.md").write_text(ENGLISH + "\nAlso `rljob doctor`.\n", encoding="utf-8")
    assert main([], root) == 0
    assert "docs/zh/page.md: is older than docs/page.md; bring the text up to it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        (CHINESE, "must begin with <!-- translates docs/page.md sha256:"),
        (first_line().replace("sha256:", "md5:") + CHINESE, "must begin with"),
        (first_line().replace("page", "other") + CHINESE, "must begin with"),
        (first_line() + CHINESE.replace("JOB", "OTHER"), "code block 1 differs in more than comments"),
        (first_line("old") + CHINESE.replace("JOB", "OTHER"), "code block 1 differs in more than comments"),
        (first_line() + CHINESE.partition("```")[0], "has 0 code blocks instead of 1"),
        (first_line() + CHINESE.replace("# 页面", "## 页面"), "has other headings than docs/page.md"),
        (
            first_line() + CHINESE.replace("`rljob plan`", "`rljob plans`"),
            "only one of them has `rljob plan`, `rljob plans`",
        ),
    ],
    ids=[
        "no first line",
        "another digest",
        "another page",
        "block",
        "block of an older page",
        "no block",
        "heading",
        "span",
    ],
)
def test_a_broken_page_fails(root: Path, text: str, finding: str) -> None:
    (root / FOLDER / "page.md").write_text(text, encoding="utf-8")
    found = findings(root)
    assert finding in str(found[0])
    assert found[0].broken


def test_a_missing_and_an_unlisted_page_fail(root: Path) -> None:
    (root / FOLDER / "page.md").rename(root / FOLDER / "new.md")
    assert [str(finding) for finding in findings(root)] == [
        "docs/zh/new.md: is not in SOURCES or OTHERS",
        "docs/zh/page.md: is missing",
    ]


def test_update_writes_the_digest(root: Path) -> None:
    changed = ENGLISH.replace("look", "look first")
    (root / "docs/page.md").write_text(changed, encoding="utf-8")
    assert main(["--update", "docs/zh/page.md"], root) == 0
    assert (root / FOLDER / "page.md").read_text(encoding="utf-8") == first_line(changed) + CHINESE
    assert findings(root) == []
