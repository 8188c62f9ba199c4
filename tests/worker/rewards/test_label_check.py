from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reward_cases import make_spec
from support.clocks import work

from rljob_worker.data.renderer import ScoredRows
from rljob_worker.data.sources import load_source
from rljob_worker.errors import UserError
from rljob_worker.rewards import label_check
from rljob_worker.rewards.label_check import LabelCheck

Make = Callable[..., LabelCheck]
MATH = {"name": "math"}


@pytest.fixture
def check(tmp_path: Path) -> Make:
    """A check of labels in a file."""

    def make(
        labels: list[Any], reward: dict[str, Any], rows: int | None = None, left_out: tuple[int, ...] = ()
    ) -> LabelCheck:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps({"prompt": "p", "label": label}) + "\n" for label in labels))
        spec = make_spec(reward, path=str(path), synthetic=None)
        assert spec.reward is not None
        source = load_source(spec.data, "spec.data")
        scored = ScoredRows(source, spec.reward, rows or len(labels), frozenset(left_out))
        return LabelCheck([scored], tmp_path / "cache")

    return make


def told(check: LabelCheck) -> list[str]:
    sentences: list[str] = []
    check.start(sentences.append)
    if check._thread is not None:
        check._thread.join(60)
    check.close()
    return sentences


def test_a_label_that_cannot_be_read_is_refused_with_file_and_row(check: Make, tmp_path: Path) -> None:
    labels = check(["7", r"\$18.90", r"\frac{1}{", 5, "..."], MATH)
    labels.run()
    with pytest.raises(UserError) as caught:
        labels.refuse()
    text = str(caught.value)
    assert f"{tmp_path / 'data.jsonl'}, row 2: the braces of the label do not match: '\\\\frac{{1}}{{'" in text
    assert "row 4: the label has no answer: '...'" in text
    assert "spec.data: 2 labels" in text
    assert "reward.onError: Score" in text


def test_labels_that_can_be_read_pass(check: Make) -> None:
    labels = check(["7", r"\$18.90", "无解", r"\text{Evelyn}"] * 100, MATH)
    labels.run()
    labels.refuse()
    assert told(labels) == []


@pytest.mark.parametrize(
    ("reward", "label", "refused"),
    [
        ({"name": "gsm8k"}, "seventy", True), ({"name": "gsm8k"}, "3:30", True),
        ({"name": "gsm8k"}, "x\n#### 1,000", False),
        ({"name": "exact"}, "{", False), (MATH | {"onError": "Score"}, "{", False),
        ({"parts": [{"name": "gsm8k"}, {"name": "math"}]}, "{", True), ({"parts": [{"name": "exact"}]}, "{", False),
    ],
)  # fmt: skip
def test_which_rewards_refuse(check: Make, reward: dict[str, Any], label: str, refused: bool) -> None:
    labels = check([label], reward)
    labels.run()
    if refused:
        with pytest.raises(UserError, match="row 0"):
            labels.refuse()
    else:
        labels.refuse()


def test_with_a_score_for_errors_they_are_told(check: Make) -> None:
    labels = check(["{", "7"], MATH | {"onError": "Score"})
    labels.run()
    (sentence,) = told(labels)
    assert "row 0: the braces of the label do not match" in sentence


def test_what_time_does_not_allow_is_read_beside(check: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_check, "_REST_SECONDS", 0.0)
    labels = check(["7"] * 500 + ["{"] * 30, MATH)
    labels.run(0.0)
    labels.refuse()
    sentences = told(labels)
    assert len(sentences) == 20, "the others are counted"
    assert "row 500" in sentences[0]


def test_the_result_is_kept_by_the_files_digest(check: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(label: str) -> object:
        reads.append(label)
        raise ValueError(f"wrong: {label}")

    reads: list[str] = []
    monkeypatch.setattr(label_check, "READERS", {"math": read})
    for _ in range(2):
        labels = check(["a", "b", "a"], MATH)
        labels.run()
        with pytest.raises(UserError, match="3 labels"):
            labels.refuse()
    assert reads == ["a", "b"], "labels that are alike once, and the same file once"
    check(["a", "b", "c"], MATH).run()
    assert reads == ["a", "b"] * 2 + ["c"], "another file is read"


def test_rows_that_are_not_used_do_not_count(check: Make) -> None:
    labels = check(["7", "{"], MATH, rows=1)
    labels.run()
    labels.refuse()


def test_rows_that_are_left_out_do_not_count_whatever_is_kept(check: Make) -> None:
    wrong = ["7", "{", "8", "{"]
    for left_out, refused in (((1,), "row 3"), ((1, 3), None), ((3,), "row 1"), ((), "2 labels")):
        labels = check(wrong, MATH, left_out=left_out)
        labels.run()
        if refused is None:
            labels.refuse()
            assert told(check(wrong, MATH, left_out=left_out)) == []
        else:
            with pytest.raises(UserError, match=refused):
                labels.refuse()


def test_a_kept_result_that_is_damaged_is_not_used(check: Make, tmp_path: Path) -> None:
    check(["{"], MATH).run()
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text('[["x"]]')
    labels = check(["{"], MATH)
    labels.run()
    with pytest.raises(UserError, match="row 0"):
        labels.refuse()


def test_thousands_of_different_labels_take_seconds(check: Make) -> None:
    labels = check([f"\\frac{{{index}}}{{7}}" for index in range(5000)], MATH)
    with work() as taken:
        labels.run(600)
    assert labels._all[0].done
    assert taken.seconds < label_check.CHECK_SECONDS
