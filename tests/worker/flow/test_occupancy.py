"""The tail of a generation: when fewer than half of the places are busy."""

from __future__ import annotations

import pytest

from rljob_worker.flow.occupancy import Occupancy


def test_the_tail_is_the_time_with_fewer_than_half_of_the_places_busy() -> None:
    occupancy = Occupancy(engines=2, places=4)
    assert occupancy.tail_share == 0.0
    occupancy.given("engine-0", 6, 100.0)
    occupancy.given("engine-1", 4, 100.0)
    occupancy.came("engine-0", 2, 103.0)
    # 4 and 4 until here, then 4 and 1: half is 4.
    occupancy.came("engine-1", 3, 105.0)
    assert (occupancy.seconds, occupancy.tail_seconds) == (5.0, 0.0)
    # 3 and 1 is half, 2 and 1 is less.
    occupancy.came("engine-0", 1, 106.0)
    occupancy.came("engine-0", 1, 107.0)
    assert occupancy.tail_seconds == 0.0
    occupancy.came("engine-0", 2, 109.0)
    occupancy.came("engine-1", 1, 110.0)
    assert (occupancy.seconds, occupancy.tail_seconds) == (10.0, 3.0)
    assert occupancy.tail_share == pytest.approx(0.3)


def test_time_between_two_rounds_is_not_counted() -> None:
    occupancy = Occupancy(engines=1, places=2)
    for begin in (10.0, 50.0):
        occupancy.given("engine-0", 2, begin)
        occupancy.came("engine-0", 1, begin + 1)
        occupancy.came("engine-0", 1, begin + 4)
    assert (occupancy.seconds, occupancy.tail_seconds) == (8.0, 0.0)


def test_what_waits_for_a_place_is_not_busy() -> None:
    for engines, tail in ((2, 0.0), (3, 2.0)):
        occupancy = Occupancy(engines, places=4)
        occupancy.given("engine-0", 100, 0.0)
        occupancy.came("engine-0", 97, 2.0)
        assert occupancy.tail_seconds == tail, f"4 of {4 * engines}, though 100 are there"
        occupancy.came("engine-0", 3, 5.0)
        assert occupancy.tail_seconds == tail + 3.0


def test_what_a_lost_engine_had_is_nobodys_until_another_is_given_it() -> None:
    occupancy = Occupancy(engines=2, places=4)
    occupancy.given("engine-0", 4, 0.0)
    occupancy.given("engine-1", 4, 0.0)
    occupancy.came("engine-1", 1, 1.0)
    assert (occupancy.left("engine-0"), occupancy.left("engine-1")) == (4, 3)
    occupancy.lost("engine-1", 2.0)
    assert (occupancy.left("engine-0"), occupancy.left("engine-1")) == (4, 0)
    occupancy.came("engine-0", 4, 3.0)
    assert (occupancy.seconds, occupancy.tail_seconds) == (3.0, 0.0), "half of the places are the other one's"
    occupancy.given("engine-0", 3, 10.0)
    occupancy.came("engine-0", 3, 12.0)
    assert (occupancy.seconds, occupancy.tail_seconds) == (5.0, 2.0)
