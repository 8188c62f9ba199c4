from __future__ import annotations

import pytest

from rljob_api.spec import SyntheticData
from rljob_worker.data.synthetic import generate_rows, symbol_names


def test_symbol_names_are_distinct_words() -> None:
    names = symbol_names(1000)
    assert names[:3] == ["a", "b", "c"]
    assert names[25:28] == ["z", "aa", "ab"]
    assert len(set(names)) == 1000


@pytest.mark.parametrize(
    ("task", "answer"), [("RepeatLast", "d d d d d d"), ("Copy", "a b c d a b"), ("Reverse", "d c b a d c")]
)
def test_answers_follow_from_the_prompt(task: str, answer: str) -> None:
    data = SyntheticData(task=task, symbols=4, promptSymbols=4, answerSymbols=6, rows=256)
    assert dict(generate_rows(data))["a b c d"] == answer


@pytest.mark.parametrize(
    ("symbols", "length", "rows", "expected"), [(2, 3, 100, 8), (13, 4, 4096, 4096), (50, 30, 500, 500)]
)
def test_rows_are_distinct_and_no_more_than_possible(symbols: int, length: int, rows: int, expected: int) -> None:
    prompts = [p for p, _ in generate_rows(SyntheticData(symbols=symbols, promptSymbols=length, rows=rows))]
    assert len(prompts) == len(set(prompts)) == expected
    assert all(len(p.split()) == length for p in prompts)


def test_the_seed_decides() -> None:
    one, same, other = (generate_rows(SyntheticData(seed=seed, rows=50)) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_every_symbol_is_about_as_frequent() -> None:
    text = " ".join(p for p, _ in generate_rows(SyntheticData(symbols=5, promptSymbols=20, rows=2000)))
    counts = [text.split().count(s) for s in symbol_names(5)]
    assert sum(counts) == 40000
    assert all(abs(count - 8000) < 400 for count in counts)
