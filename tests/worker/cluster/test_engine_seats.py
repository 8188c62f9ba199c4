"""Engines that come and go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rljob_worker.cluster.elastic import change_of_seats

TWO = {"engine-0": "a", "engine-1": "b"}


def test_nothing_changes_where_all_are_there_or_on_their_way() -> None:
    assert change_of_seats(TWO, [], 2, 1) == ([], [])
    assert change_of_seats({"engine-0": "a"}, ["engine-1"], 2, 1) == ([], [])


def test_more_nodes_get_new_engines_with_the_smallest_free_numbers() -> None:
    assert change_of_seats({"engine-0": "a", "engine-2": "b"}, ["engine-3"], 5, 1) == ([], ["engine-1", "engine-4"])
    assert change_of_seats({"engine-0": "a", "engine-1": "a"}, [], 2, 2) == ([], ["engine-2", "engine-3"])


def test_fewer_nodes_are_given_back_whole_the_newest_first() -> None:
    assert change_of_seats(TWO, [], 1, 1) == (["engine-1"], [])
    assert change_of_seats({"engine-1": "b", "engine-0": "a"}, [], 1, 1) == (["engine-0"], [])
    four = {"engine-0": "a", "engine-1": "a", "engine-2": "b", "engine-3": "b"}
    assert change_of_seats(four, [], 1, 2) == (["engine-2", "engine-3"], [])


def test_a_node_that_lost_an_engine_goes_before_a_full_one() -> None:
    seats = {"engine-0": "a", "engine-2": "b", "engine-3": "b"}
    assert change_of_seats(seats, ["engine-1"], 1, 2) == (["engine-0", "engine-1"], [])


def test_an_engine_that_is_being_made_goes_before_one_that_takes_part() -> None:
    assert change_of_seats(TWO, ["engine-2"], 2, 1) == (["engine-2"], [])
    assert change_of_seats(TWO, ["engine-2", "engine-3"], 3, 1) == (["engine-3"], [])


@given(
    st.lists(st.sampled_from("abcde"), min_size=1, max_size=10).filter(
        lambda nodes: max(nodes.count(node) for node in nodes) <= 2
    ),
    st.integers(0, 4),
    st.integers(1, 6),
)
def test_afterwards_there_are_as_many_as_are_wanted_or_will_be(nodes: list[str], made: int, wanted: int) -> None:
    seats = {f"engine-{number}": node for number, node in enumerate(nodes)}
    coming = [f"engine-{len(nodes) + number}" for number in range(made)]
    gone, new = change_of_seats(seats, coming, wanted, 2)
    left = [name for name in seats if name not in gone]
    assert left
    assert len({seats[name] for name in left}) == min(wanted, len(set(nodes)))
    assert {seats[name] for name in gone if name in seats}.isdisjoint({seats[name] for name in left})
    after = [*left, *(name for name in coming if name not in gone), *new]
    assert len(after) == len(set(after)) == 2 * wanted
    assert change_of_seats({name: seats.get(name, name) for name in left}, after[len(left) :], wanted, 2) == ([], [])
