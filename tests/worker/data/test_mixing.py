"""Sources that are mixed by weights which change over the steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.spec import DataSource
from rljob_worker.data.mixing import Mixture

PER_STEP = 8


def source(*weights: tuple[int, float]) -> DataSource:
    changes = [{"from": step, "value": value} for step, value in weights]
    return DataSource.model_validate({"path": "a.jsonl", "weights": changes})


def test_one_weight_from_step_0_on_is_that_weight() -> None:
    fixed = [DataSource(path="a.jsonl", weight=weight) for weight in (3.0, 1.0, 0.7)]
    changing = [source((0, weight)) for weight in (3.0, 1.0, 0.7)]
    orders = [Mixture(sources, PER_STEP, 7).order([0, 0, 0], 500) for sources in (fixed, changing)]
    assert orders[0].tolist() == orders[1].tolist()


def test_a_change_comes_with_the_first_prompt_of_its_step() -> None:
    mixture = Mixture([source((0, 1), (3, 0)), source((0, 0), (3, 1))], PER_STEP, 1)
    assert mixture.order([0, 0], 4 * PER_STEP).tolist() == [0] * 2 * PER_STEP + [1] * 2 * PER_STEP


@given(
    values=st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=3, max_size=3), min_size=2, max_size=4),
    seed=st.integers(0, 99),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
def test_each_part_of_the_steps_has_its_own_mix_and_a_restart_changes_nothing(
    values: list[list[float]], seed: int, cuts: list[int]
) -> None:
    # One more source, so that there is always one to draw from.
    sources = [source(*zip((0, 5, 12), of_one)) for of_one in values] + [DataSource(path="rest.jsonl", weight=0.25)]
    mixture, count = Mixture(sources, PER_STEP, seed), 20 * PER_STEP
    order = mixture.order([0] * len(sources), count)
    weights = np.array([[*(of_one[part] for of_one in values), 0.25] for part in range(3)])
    due = np.zeros(len(sources))
    for number, drawn in enumerate(order, start=1):
        step = (number - 1) // PER_STEP + 1
        part = 0 if step < 5 else 1 if step < 12 else 2
        assert weights[part][drawn] > 0
        due += weights[part] / weights[part].sum()
        behind = due - np.bincount(order[:number], minlength=len(sources))
        assert np.abs(behind[weights[part] > 0]).max() < len(sources)
    again: list[int] = []
    for cut in [*cuts, count]:
        n = min(cut, count - len(again))
        drawn_so_far = np.bincount(again, minlength=len(sources)) if again else np.zeros(len(sources), dtype=int)
        again += Mixture(sources, PER_STEP, seed).order(drawn_so_far.tolist(), n).tolist()
    assert again == order.tolist()


@pytest.mark.parametrize("step", [0, 1])
def test_steps_0_and_1_are_the_beginning(step: int) -> None:
    mixture = Mixture([source((0, 5), (step, 1)) if step else source((0, 1)), source((0, 1))], PER_STEP, 1)
    assert np.bincount(mixture.order([0, 0], 10 * PER_STEP)).tolist() == [5 * PER_STEP, 5 * PER_STEP]
