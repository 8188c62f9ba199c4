from __future__ import annotations

from rljob_worker.rewards.trial import Count, Distribution, counts


def test_few_values_are_counted_one_by_one() -> None:
    assert counts([1.0, 0.0, 1.0]) == [Count(0.0, 0.0, 1), Count(1.0, 1.0, 2)]


def test_many_values_are_counted_by_ranges() -> None:
    found = counts([float(value) for value in range(101)])
    assert [count.count for count in found] == [10] * 9 + [11]
    assert (found[0].low, found[-1].high) == (0.0, 100.0)


def test_values_at_the_ends_of_what_floats_hold() -> None:
    values = [-1.7e308, 1.7e308, *map(float, range(20))]
    assert sum(count.count for count in counts(values)) == len(values)


def test_a_distribution() -> None:
    assert Distribution.of([1.0, 3.0]) == Distribution(2, 2.0, 1.0, 1.0, 3.0)
