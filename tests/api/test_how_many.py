"""Numbers with their nouns in messages."""

from __future__ import annotations

import pytest

from rljob_api.how_many import all_of, how_many


@pytest.mark.parametrize(
    ("count", "forms", "said"),
    [
        (0, ("step",), "0 steps"),
        (1, ("step",), "1 step"),
        (2, ("step",), "2 steps"),
        (1, ("process", "processes"), "1 process"),
        (3, ("process", "processes"), "3 processes"),
        (1, ("row is", "rows are"), "1 row is"),
        (0, ("row is", "rows are"), "0 rows are"),
    ],
)
def test_the_noun_follows_the_number(count: int, forms: tuple[str, ...], said: str) -> None:
    assert how_many(count, *forms) == said


def test_all_of_one_is_the_only_one() -> None:
    assert all_of(1, "step is", "steps are") == "the only step is"
    assert all_of(40, "step is", "steps are") == "all 40 steps are"
