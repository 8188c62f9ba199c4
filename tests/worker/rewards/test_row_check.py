"""Tests of programs, which are read before a step needs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rljob_api.spec import RLJobSpec
from rljob_worker.data.sources import data_sources, evaluation_sources, load_source
from rljob_worker.errors import UserError
from rljob_worker.rewards.row_check import check_first_rows, check_tests, scored_rows

CASES = {"inputs": ["1\n"], "outputs": ["2\n"]}
CALLS = {"fn_name": "f", "inputs": [[1]], "outputs": [2]}
CODE: dict[str, Any] = {"name": "code", "args": {"kind": "Stdin", "tests": "tests"}}
Make = Callable[..., RLJobSpec]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def job(rows: list[dict[str, Any]], reward: dict[str, Any] = CODE, **blocks: Any) -> RLJobSpec:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps({"prompt": "a", "label": "b", **row}) + "\n" for row in rows))
        manifest: dict[str, Any] = {
            "steps": 1,
            "model": {"path": "/m"},
            "data": {"path": str(path)},
            "reward": reward,
            "rollout": {"promptsPerStep": 1, "samplesPerPrompt": 2, "maxResponseTokens": 8},
        }
        return RLJobSpec.model_validate(manifest | blocks)

    return job


def check(spec: RLJobSpec) -> None:
    """All of a job's rows, as the driver does."""
    sources = data_sources(spec) + evaluation_sources(spec)
    check_tests([scored_rows(spec, load_source(source, field)) for field, source in sources])


@pytest.mark.parametrize(
    ("data", "columns"),
    [
        ({"synthetic": {"rows": 50}}, frozenset()),
        ({"synthetic": {"task": "NameColor", "rows": 10**7}}, frozenset()),
        ({"synthetic": {"rows": 10**7}}, None),
        ({"seeds": {"count": 9}, "environment": {"name": "FrozenLake"}}, {"seed", "turns"}),
        ({"seeds": {"count": 10**7}, "environment": {"name": "FrozenLake"}}, None),
    ],
)
def test_generated_rows_are_looked_at_where_that_takes_no_time(
    make: Make, data: dict[str, Any], columns: frozenset[str] | None
) -> None:
    spec = make([], {"name": "exact"}, data=data)
    assert check_first_rows(spec, spec.data, "spec.data") == columns
    spec = make([], {"by": "kind", "parts": [{"name": "exact", "rows": ["m"]}]}, data=data)
    with pytest.raises(UserError, match="has no column 'kind'") if columns is not None else nullcontext():
        check_first_rows(spec, spec.data, "spec.data")


@pytest.mark.parametrize("first", [check, lambda spec: check_first_rows(spec, spec.data, "spec.data")])
def test_rows_that_cannot_be_tested_are_named(make: Make, first: Callable[[RLJobSpec], None]) -> None:
    with pytest.raises(UserError) as error:
        first(make([{"tests": CASES}, {}, {"tests": {"inputs": [], "outputs": []}}, {"tests": "x"}, {"tests": [7]}]))
    text = str(error.value)
    assert "spec.reward: 4 of 5 rows of spec.data cannot be tested" in text
    assert "data.jsonl, row 1: the row has no column 'tests' (args.tests)" in text
    assert "row 2: there are no tests" in text
    assert "row 3: the text of the tests is no JSON" in text
    assert "row 4: the tests are neither" in text
    assert "row 0" not in text


@pytest.mark.parametrize(
    ("args", "right", "wrong", "said"),
    [
        ({"kind": "Calls"}, CALLS, CASES, "no function is named"),
        ({"kind": "Calls", "function": "f"}, {**CALLS, "fn_name": None}, {"inputs": [3], "outputs": [2]}, "an input"),
        ({"kind": "Pytest"}, "def test_a(): pass", "def test_a(:", "the tests are no Python"),
        ({"kind": "Stdin", "prefix": "label"}, CASES, [{"input": "1"}], "the tests are neither"),
    ],
)  # fmt: skip
def test_each_kind(make: Make, args: dict[str, Any], right: object, wrong: object, said: str) -> None:
    reward = {"name": "code", "args": {"tests": "tests", **args}}
    check(make([{"tests": right}], reward))
    with pytest.raises(UserError, match=rf"row 1: {said}"):
        check(make([{"tests": right}, {"tests": wrong}], reward))


def test_a_column_of_text_before_the_program_is_looked_for(make: Make) -> None:
    reward = {"name": "code", "args": {"kind": "Stdin", "tests": "tests", "prefix": "given"}}
    with pytest.raises(UserError, match=r"row 1: the row has no column 'given' \(args.prefix\)"):
        check(make([{"tests": CASES, "given": "x"}, {"tests": CASES}], reward))


def test_rows_that_are_not_scored_are_not_looked_at(make: Make, tmp_path: Path) -> None:
    data = {"path": str(tmp_path / "data.jsonl"), "skip": [1]}
    check(make([{"tests": CASES}, {}], data=data))
    routed = {"by": "tag", "parts": [{**CODE, "rows": ["code"]}, {"name": "exact", "rows": ["text"]}]}
    check(make([{"tests": CASES, "tag": "code"}, {"tag": "text"}], routed))
    with pytest.raises(UserError, match=r"2 of 3 rows .*\n.*row 1"):
        check(make([{"tests": CASES, "tag": "code"}, {"tag": "code"}, {"tag": "code"}], routed))
    held_out = {"data": {"path": str(tmp_path / "data.jsonl")}, "maxPrompts": 1}
    check(make([{"tests": CASES}, {}], data=data, evaluation=held_out))


def test_a_reward_that_may_fail_fails_for_no_single_row(make: Make) -> None:
    lenient = {**CODE, "onError": "Score"}
    check(make([{"tests": CASES}, {}], lenient))
    with pytest.raises(UserError, match="2 of 2 rows"):
        check(make([{}, {}], lenient))
