"""docs/zh/reference.md: Chinese texts where there are some, English ones where these are missing or older."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rljob_api.reference import described, reference
from rljob_api.reference_zh import CATALOGUE, Chinese, digest, main, write

SPAN = re.compile(r"`([^`]+)`")
CHINESE = Chinese.load()


def test_texts_are_of_fields_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert CHINESE.unknown() == [], "remove these keys from reference_zh.yaml, or give them their fields' new paths"
    missing = CHINESE.missing()
    with capsys.disabled():
        print(
            f"\nChinese reference: {len(described()) - len(missing)} of {len(described())} texts; in English: {missing}"
        )


def test_texts_have_the_names_of_the_english_ones() -> None:
    english = described()
    current = {key: entry for key, entry in CHINESE.catalogue.items() if entry["of"] == digest(english[key])}
    other = {key: set(SPAN.findall(entry["zh"])) ^ set(SPAN.findall(english[key])) for key, entry in current.items()}
    assert {key: names for key, names in other.items() if names} == {}


def test_reference_has_the_rows_of_the_english_one() -> None:
    def rows(text: str) -> list[str]:
        return re.findall(r"^(?:\| `[\w.]+` \||## [a-z].*)", text, re.MULTILINE)

    assert rows(reference(CHINESE)) == rows(reference())


def test_a_text_of_another_english_one_is_not_shown() -> None:
    english = described()["spec.steps"]
    entry = {"of": digest(english), "zh": "训练步数。"}
    assert Chinese({"spec.steps": entry}).text(english) == "训练步数。"
    assert Chinese({"spec.steps": entry}).text(english + " New.") == english + " New."
    older = Chinese({"spec.steps": {**entry, "of": digest("Old.")}})
    assert older.text(english) == english
    assert "spec.steps" in older.missing()


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ("whole number, at least 0 and at most 15", "整数，≥ 0 且 ≤ 15"),
        ("number, above 0 and below 1", "数，> 0 且 < 1"),
        ("string, like ^/", "字符串，匹配 ^/"),
        ("list of string, not empty (at most 16)", "列表：字符串，非空（至多 16 项）"),
        ("mapping of names to whole number, at least 0", "映射：名称到整数，≥ 0"),
        ("one of Auto, Disk", "取值 Auto, Disk"),
        ("free-form mapping", "自由格式的映射"),
    ],
)
def test_types(english: str, chinese: str) -> None:
    assert CHINESE.kind(english) == chinese


def test_update_writes_the_digest_of_today(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "catalogue.yaml"
    file.write_text('spec.steps: {of: "0", zh: 训练步数。}\nspec.gone: {of: "0", zh: 无。}\n', encoding="utf-8")
    assert main([], file) == 1
    assert "spec.steps: older than the English text: Training steps." in capsys.readouterr().out
    assert main(["--update", "spec.steps"], file) == 1
    out = capsys.readouterr().out
    assert "spec.steps:" not in out
    assert "spec.gone: nothing in the reference has this key" in out
    with pytest.raises(SystemExit):
        main(["--update", "spec.gone"], file)


def test_catalogue_is_as_it_is_written(tmp_path: Path) -> None:
    """Lines in the order of the reference, so that a diff shows the fields that changed."""
    copy = tmp_path / "catalogue.yaml"
    write(CHINESE.catalogue, copy)
    assert copy.read_bytes() == CATALOGUE.read_bytes()
