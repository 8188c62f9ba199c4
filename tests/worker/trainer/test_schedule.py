from __future__ import annotations

import pytest

from rljob_api.spec import OptimizerSpec
from rljob_worker.trainer.learning_rate import learning_rate


def rates(total: int = 10, **fields: object) -> list[float]:
    spec = OptimizerSpec.model_validate({"lr": 1.0, "minLr": 0.1} | fields)
    return [learning_rate(update, spec, total) for update in range(total)]


def test_constant() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]


def test_warm_up_rises_from_zero_to_the_peak() -> None:
    assert rates(5, warmupSteps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_ends_at_the_minimum_with_the_last_update() -> None:
    assert rates(6, schedule="linear", warmupSteps=2) == pytest.approx([0.5, 1.0, 0.775, 0.55, 0.325, 0.1])


def test_no_update_is_lost_at_rate_0() -> None:
    assert rates(4, schedule="linear", minLr=0.0) == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert rates(3, schedule="linear", minLr=0.0, warmupSteps=1) == pytest.approx([1.0, 2 / 3, 1 / 3])
    assert min(rates(20, schedule="cosine", minLr=0.0)) > 0.005
    assert rates(4, schedule="linear", minLr=0.0, decaySteps=2) == pytest.approx([2 / 3, 1 / 3, 0.0, 0.0])


def test_cosine_is_halfway_in_the_middle_and_stays_at_the_minimum() -> None:
    values = rates(10, schedule="cosine", decaySteps=4)
    assert values[1] == pytest.approx(0.55)
    assert values[3:] == pytest.approx([0.1] * 7)
    assert values == sorted(values, reverse=True)


def test_warm_up_longer_than_the_decay_ends_at_the_minimum() -> None:
    assert rates(4, schedule="linear", warmupSteps=2, decaySteps=2) == [0.5, 1.0, 0.1, 0.1]
