"""Text of strangers is shown, and obeyed nowhere."""

from __future__ import annotations

import json

import pytest

from rljob_api.safe_text import visible, visible_block, visible_json, visible_line

HOSTILE = "a\x1b[2J\x9b \u202e \u2028 \U000e0041 \x7f\r\nb"


def test_a_line_stays_one() -> None:
    assert visible_line("plain 日本") == "plain 日本"
    assert visible_line(HOSTILE) == r"a\x1b[2J\x9b \u202e \u2028 \U000e0041 \x7f\r\nb"
    assert len(visible_line("\n".join("ab")).splitlines()) == 1


def test_no_later_line_of_a_block_begins_at_the_margin() -> None:
    shown = visible_block("one\n--- two\r--- three\x0b--- four\x85--- five", "    | ")
    assert shown.splitlines() == ["one", r"    | --- two\r--- three\x0b--- four\x85--- five"]
    assert visible(shown) == shown


@pytest.mark.parametrize("text", ["plain 日本", HOSTILE, "\ud800", '"\\'])
def test_json_says_the_same_and_holds_nothing_that_is_obeyed(text: str) -> None:
    shown = visible_json({"a": [text], text: 1})
    assert json.loads(shown) == {"a": [text], text: 1}
    assert visible(shown) == shown
    assert ("日本" in shown) == ("日本" in text)
