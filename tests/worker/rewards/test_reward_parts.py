"""Named parts of rewards become metrics: a bounded number of them, and none is left out unsaid."""

from __future__ import annotations

import math

import pytest

from rljob_api.reward_parts import LEFT_OUT_KEY, MOST_PARTS, PREFIX, PartNames
from rljob_worker.rewards.parts import PartMeans
from rljob_worker.types import RewardResult


def results(*parts: dict[str, float]) -> list[RewardResult]:
    return [RewardResult(0.0, part) for part in parts]


def means(earlier: list[str] | None = None) -> tuple[PartMeans, list[list[str]]]:
    told: list[list[str]] = []
    return PartMeans(earlier or [], told.append), told


def test_a_part_is_averaged_over_the_samples_that_have_it() -> None:
    made, told = means()
    metrics = made.metrics(results({"format": 1.0, "length": -0.5}, {"format": 0.0}, {}))
    assert metrics == {f"{PREFIX}format": 0.5, f"{PREFIX}length": -0.5, LEFT_OUT_KEY: 0.0}
    assert told == []
    assert made.metrics(results({}, {})) == {}


def test_a_sum_that_no_float_holds_is_no_error() -> None:
    made, _ = means()
    assert made.metrics(results({"x": 1.7e308}, {"x": 1.7e308}))[f"{PREFIX}x"] == math.inf


@pytest.mark.parametrize("name", ["format", "Länge", "正确", "a/b.c-d_e f", "3", "x" * 64])
def test_a_name_that_can_be_a_label_has_a_metric(name: str) -> None:
    assert PartNames().admit([name]) == []


@pytest.mark.parametrize("name", ["", "_x", " x", "$x$", 'a"b', "a\nb", "a\x1bb", "\ud800", "\u202ex", "x" * 65, "x{}"])
def test_a_name_that_cannot_is_told_and_counted(name: str) -> None:
    made, told = means()
    assert made.metrics(results({name: 1.0, "fine": 2.0})) == {f"{PREFIX}fine": 2.0, LEFT_OUT_KEY: 1.0}
    assert told == [[name]]


def test_the_names_that_came_first_stay_and_the_others_are_told_once_and_counted_each_time() -> None:
    made, told = means()
    first = {f"p{i:02}": float(i) for i in range(MOST_PARTS - 1)}
    assert len(made.metrics(results(first))) == MOST_PARTS
    for _ in range(2):
        metrics = made.metrics(results({"a": 1.0, "b": 2.0, "c": 3.0, "p00": 4.0}))
        assert metrics == {f"{PREFIX}a": 1.0, f"{PREFIX}p00": 4.0, LEFT_OUT_KEY: 2.0}
    assert told == [["b", "c"]]


def test_an_attempt_goes_on_with_the_names_of_the_one_before() -> None:
    made, told = means([f"p{i:02}" for i in range(MOST_PARTS)])
    assert made.metrics(results({"a": 1.0, "p31": 2.0})) == {f"{PREFIX}p31": 2.0, LEFT_OUT_KEY: 1.0}
    assert told == [["a"]]


def test_a_reward_with_ever_new_names_fills_no_log() -> None:
    made, told = means([f"p{i:02}" for i in range(MOST_PARTS)])
    for step in range(100):
        assert made.metrics(results({f"new {step}": 1.0}))[LEFT_OUT_KEY] == 1.0
    assert len(told) == 32
