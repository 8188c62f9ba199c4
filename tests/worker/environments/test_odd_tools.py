"""Tools that are unusual and right, and those that are wrong: each is taken, or refused by its name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_worker.environments.base import MAX_OBSERVATION_BYTES, checked_step
from rljob_worker.environments.calls import ToolCall, UnreadableCallError, _arguments
from rljob_worker.environments.load import REACH
from rljob_worker.environments.python_tools import ToolError
from rljob_worker.environments.tool_schemas import sample
from rljob_worker.environments.tools import Toolbox, ToolSource, _fitting, _same, _told
from rljob_worker.errors import UserError

SERVER = Path(__file__).with_name("odd_mcp_server.py")


def served(case: str) -> Toolbox:
    return Toolbox(ToolSource(((sys.executable, str(SERVER), case),)), REACH)


@pytest.fixture(scope="module")
def right() -> Iterator[Toolbox]:
    box = served("right")
    yield box
    box.close()


def test_the_tools_of_all_pages_are_there(right: Toolbox) -> None:
    names = [schema["function"]["name"] for schema in right.schemas]
    assert names == [
        "anything", "nothing", "true", "unlisted", "typed", "either", "letters", "nested", "raises", "structured",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "fits", "fault"),
    [
        ("anything", {"a": 1}, None),
        ("nothing", {}, {"a": 1}),
        ("true", {"a": None}, {}),
        ("unlisted", {"b": 1}, {}),
        ("typed", {"at": {"x": 1}, "many": None, "five": 7, "day": "2026-01", "pair": [1, "a"]}, {"pair": ["a"]}),
        ("either", {"a": "x"}, {"a": 1}),
        ("letters", {"a": "é"}, {"a": 1}),
        ("nested", {"node": {"next": {"next": {}}}}, {"node": {"next": 1}}),
    ],
)
def test_a_call_is_checked_by_what_json_schema_says(
    right: Toolbox, name: str, fits: dict[str, Any], fault: dict[str, Any] | None
) -> None:
    assert right.fault(ToolCall(name, fits)) is None
    if fault is not None:
        assert str(right.fault(ToolCall(name, fault))).startswith(f"the arguments of {name} do not fit: ")


def test_arguments_that_are_nested_without_end_are_the_policys_fault(right: Toolbox) -> None:
    node: dict[str, Any] = {}
    for _ in range(900):
        node = {"next": node}
    assert right.fault(ToolCall("nested", {"node": node})) == "the arguments of nested are nested too deeply"


def test_a_sample_that_breaks_a_rule_of_its_schema_is_written_all_the_same(right: Toolbox) -> None:
    (typed,) = (one for one in right.schemas if one["function"]["name"] == "typed")
    assert sample(typed) == {"at": "a", "many": "a", "five": 1, "day": "a"}


class _Reader:
    def read(self, answer: str) -> list[ToolCall]:
        if "[" not in answer:
            raise UnreadableCallError("no list")
        return [ToolCall(word, {}) for word in answer.strip("[]").split()]


@pytest.mark.parametrize(
    ("back", "same"), [("[a]", True), ("[ a ]", True), ("[b]", False), ("a", False), ("[]", False)]
)
def test_a_tokenizer_may_write_a_call_in_other_blanks(back: str, same: bool) -> None:
    assert _same(_Reader(), "[a]", back) is same  # type: ignore[arg-type]


def test_a_server_that_does_not_take_arguments_says_so_to_the_policy(right: Toolbox) -> None:
    (group,) = right.groups
    with pytest.raises(ToolError, match="a is no colour"):
        group.call(None, "raises", {"a": "x"})
    assert group.call(None, "structured", {}) == '{"a": 1}'
    assert group.call(None, "nothing", {}) == "done"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("twice", r"has two tools 'same'"),
        ("mistyped", r"tool wrong: its parameters are no JSON Schema: properties.a.type: 'str' is not valid"),
        ("unmapped", r"tool wrong: its parameters are no JSON Schema: properties.a.enum: 'abc' is not of type 'array'"),
        ("unmatched", r"tool wrong: its parameters are no JSON Schema: properties.a.pattern: 7 is not of type"),
        ("dangling", r"tool wrong: the JSON Schema of its parameters cannot be used: .*/\$defs/none"),
        ("remote", r"tool wrong: the JSON Schema of its parameters cannot be used: .*127.0.0.1:9/schema.json"),
        ("circular", r"tool wrong: the JSON Schema of its parameters refers to itself"),
        ("endless", r"page 'again' comes again and again"),
        ("version", r"is no MCP server: .*1812-06-24"),
    ],
)
def test_a_server_whose_tools_cannot_be_called_is_refused_by_their_names(case: str, said: str) -> None:
    with pytest.raises(UserError, match=rf"^environment.tools\[0\].*{said}"):
        served(case).close()


def test_a_server_that_says_more_than_it_is_asked_is_understood(caplog: pytest.LogCaptureFixture) -> None:
    box = served("later")
    assert box.groups[0].call(None, "one", {}) == "done"
    box.close()
    # Each line that is no message is told in one, without a traceback.
    assert len(caplog.records) > 1
    assert "Invalid JSON" in caplog.text
    assert "Traceback" not in caplog.text
    assert caplog.text.count("\n") == len(caplog.records)


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1e999}', '{"a": [-Infinity]}', '{"a": "\\ud83d"}'])
def test_arguments_that_are_no_json_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON compliant|surrogates not allowed"):
        _arguments(text)


def test_what_a_policy_wrote_is_repeated_to_it_in_part() -> None:
    assert len(_told("x" * 2**20)) < 3000
    assert _told("\ud83d") == "error: \\ud83d"


@pytest.mark.parametrize(
    "replies",
    [["x" * 5_000_000], ["é" * 2**20, "short", "y" * 2**20], ["z" * 70_000] * 16],
    ids=["one", "three", "many"],
)
def test_long_results_are_cut_in_the_middle(replies: list[str]) -> None:
    found = _fitting(replies)
    assert len("\n".join(found).encode()) <= MAX_OBSERVATION_BYTES
    for text, reply in zip(found, replies, strict=True):
        assert text == reply or (text[0], text[-1], " bytes left out ...] " in text) == (reply[0], reply[-1], True)
    assert "short" in found or len(replies) != 3


def test_results_that_fit_stay_as_they_are_but_for_halves_of_characters() -> None:
    assert _fitting(["é" * 1000, "", "a\ud800"]) == ["é" * 1000, "", "a\\ud800"]


def test_a_whole_number_beyond_all_floats_is_named() -> None:
    with pytest.raises(ValueError, match="the reward is inf, which is not finite in fp32"):
        checked_step(("x", 10**400, False, False, {}))
