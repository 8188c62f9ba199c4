"""Tail batching: each prompt is trained on once, the long ones in steps of their own, and none waits for ever."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_worker.flow.partial import spread
from rljob_worker.flow.tail import cuts, is_long, longest_wait, members


class Run:
    """Steps over groups that each take a number of engine steps of their own, whenever they are sampled."""

    def __init__(self, wanted: int, at_once: int, engines: int, lengths: random.Random) -> None:
        self.wanted, self.at_once, self.engines = wanted, at_once, engines
        self._lengths, self.equal = lengths, False
        self.length: list[int] = []
        self.open: dict[int, int | None] = {}
        self.trained: dict[int, int] = {}
        self.deferred: dict[int, int] = {}
        self.long: list[int] = []

    def step(self, number: int) -> int:
        """Returns how many engine steps it took."""
        long = is_long(self.open, self.wanted, number, longest_wait(self.wanted, self.at_once))
        room = (self.wanted if long else self.at_once) - len(members(self.open, self.wanted, long))
        for _ in range(room):
            self.open[len(self.length)] = None
            self.length.append(7 if self.equal else math.ceil(self._lengths.lognormvariate(3, 1.5)))
        mine = members(self.open, self.wanted, long)
        assert len(mine) == (self.wanted if long else self.at_once)
        complete, took = self._generate(mine)
        assert len(complete) >= self.wanted
        if long:
            self.long.append(number)
            assert complete == set(mine), "a long step waits for all"
        for ordinal in sorted(complete)[: self.wanted]:
            assert ordinal not in self.trained
            self.trained[ordinal] = number
            del self.open[ordinal]
        for ordinal in set(mine) - complete:
            self.open[ordinal] = self.deferred[ordinal] = number
        return took

    def _generate(self, mine: list[int]) -> tuple[set[int], int]:
        held = spread(mine, self.engines)
        complete: set[int] = set()
        took = 0
        for of_engine, cut in zip(held, cuts(held, self.wanted), strict=True):
            for quota in cut.quotas:
                assert quota.among == set(of_engine)
                last = sorted(self.length[ordinal] for ordinal in of_engine)[quota.least - 1]
                complete |= {ordinal for ordinal in of_engine if self.length[ordinal] <= last}
                took = max(took, last)
        return complete, took


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**32), st.integers(0, 60))
def test_every_prompt_is_trained_on_once_and_none_waits_for_ever(
    wanted: int, more: int, engines: int, seed: int, equal_from: int
) -> None:
    run = Run(wanted, wanted + min(more, wanted), engines, random.Random(seed))
    bound = longest_wait(wanted, run.at_once) + math.ceil(run.at_once / wanted)
    steps = 60
    for number in range(1, steps + 1):
        # From here on nothing is longer than anything else: what was deferred before must not wait for company.
        run.equal = number > equal_from
        run.step(number)
        assert len(run.trained) == wanted * number
        assert len(run.open) <= 2 * run.at_once
    for ordinal, since in run.deferred.items():
        if ordinal in run.trained:
            assert run.trained[ordinal] - since <= bound
            assert run.trained[ordinal] in run.long
        else:
            assert steps - since < bound
    assert sorted([*run.trained, *run.open]) == list(range(len(run.length)))


@pytest.mark.parametrize("engines", [1, 2])
def test_the_share_that_is_deferred_is_the_share_of_the_long_steps(engines: int) -> None:
    run = Run(16, 20, engines, random.Random(1))
    took = {number: run.step(number) for number in range(1, 501)}
    assert len(run.long) == pytest.approx(100, abs=5)
    short = [took[number] for number in took if number not in run.long]
    longest = [max(run.length[o] for o, step in run.trained.items() if step == number) for number in run.long]
    assert [took[number] for number in run.long] == longest
    whole = [max(run.length[16 * i : 16 * i + 16]) for i in range(500)]
    assert sum(took.values()) < 0.75 * sum(whole), "it saved nothing"
    assert sum(short) / len(short) < sum(whole) / len(whole) / 2
    # Nobody's length has a part in whether it is trained on: all of them were, but for what waits at the end.
    assert len(run.trained) >= len(run.length) - 2 * 20


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 60))
def test_engines_complete_together_exactly_what_is_missing(sizes: list[int], missing: int) -> None:
    held = [[100 * engine + i for i in range(size)] for engine, size in enumerate(sizes)]
    made = cuts(held, missing)
    least = [sum(quota.least for quota in cut.quotas) for cut in made]
    assert sum(least) == min(missing, sum(sizes))
    assert all(asked <= size for asked, size in zip(least, sizes, strict=True))
    share = sum(least) / max(1, sum(sizes))
    assert all(abs(asked - share * size) <= 1 for asked, size in zip(least, sizes, strict=True))


def test_a_step_is_long_when_enough_wait_or_one_has_waited_long_enough() -> None:
    assert longest_wait(16, 20) == 8
    assert longest_wait(4, 8) == 2
    waiting = {3: 5, 4: None, 8: 6, 9: None}
    assert is_long(waiting, 2, 7, 100)
    assert not is_long(waiting, 3, 7, 3)
    assert is_long(waiting, 3, 8, 3)
    assert not is_long({4: None, 9: None}, 1, 8, 0)


def test_a_long_step_takes_those_that_were_deferred_first() -> None:
    waiting = {1: None, 2: 9, 5: 9, 6: 7, 8: None, 9: 7}
    assert members(waiting, 3, long=True) == [2, 6, 9]
    assert members(waiting, 5, long=True) == [1, 2, 5, 6, 9]
    assert members(waiting, 3, long=False) == [1, 8]
