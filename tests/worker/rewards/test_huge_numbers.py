"""Rewards that are whole numbers of any length."""

from __future__ import annotations

import pytest

from rljob_worker.rewards.functions import checked_score


@pytest.mark.parametrize("power", [400, 5000])
def test_a_whole_number_that_no_float_holds_is_named(power: int) -> None:
    with pytest.raises(ValueError, match=r"^the reward is (10+|a whole number of thousands of digits), not a finite"):
        checked_score(10**power)
