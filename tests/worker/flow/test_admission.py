"""Generation ahead of training: whatever completes first, no token is too old, and no step waits for ever."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.spec.rollout import StalenessOrder
from rljob_worker.flow import Episode, Finish, Group, TokenStream
from rljob_worker.flow.admission import next_batch, ranges, room
from rljob_worker.flow.partial import overdue
from rljob_worker.rollouts.policies.whole import contiguous

IN_ORDER, READY_FIRST = StalenessOrder


def group(ordinal: int, oldest: int, complete: bool = True) -> Group:
    stream = TokenStream.of_prompt([7]).append_sampled([1], [-0.5], version=oldest)
    return Group(ordinal, oldest, (Episode(ordinal, 0, stream, Finish.STOP if complete else None),))


@given(
    seed=st.integers(0, 2**32),
    wanted=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    steps=st.integers(1, 12),
    order=st.sampled_from(StalenessOrder),
    speed=st.floats(0.1, 1.0),
    more=st.none() | st.integers(0, 20),
)
def test_a_whole_run_is_within_the_bound_and_trains_on_each_group_once(
    seed: int, wanted: int, max_staleness: int, steps: int, order: StalenessOrder, speed: float, more: int | None
) -> None:
    """Groups are begun, sampled and completed at random; the last resort is that all are complete."""
    chance, trained, begun = random.Random(seed), list[int](), 0
    most = None if more is None else wanted + more
    open_groups: dict[int, Group] = {}
    ready: set[int] = set()
    for version in range(steps):
        for _ in range(room(len(open_groups), wanted, steps - version, max_staleness, most)):
            open_groups[begun] = Group(begun, version, (Episode(begun, 0, TokenStream.of_prompt([7])),))
            begun += 1
        assert most is None or len(open_groups) <= most
        batch = None
        while batch is None:
            growing = [one for one in open_groups.values() if one.ordinal not in ready]
            assert growing or next_batch(open_groups.values(), ready, wanted, version, max_staleness, order) is not None
            for one in growing:
                episode = one.episodes[0]
                if not episode.stream.num_sampled and chance.random() > speed:
                    # Nothing was sampled of it: it begins where it stands.
                    open_groups[one.ordinal] = replace(one, admitted_version=version)
                    continue
                stream = episode.stream.append_sampled([1], [-0.5], version=version)
                done = chance.random() < max(0.1, speed)
                grown = replace(episode, stream=stream, finish=Finish.STOP if done else None)
                open_groups[one.ordinal] = replace(one, episodes=(grown,))
                ready |= {one.ordinal} if done else set()
            assert overdue(open_groups.values(), wanted, version, max_staleness) is None
            batch = next_batch(open_groups.values(), ready, wanted, version, max_staleness, order)
        assert len(batch) == wanted
        for one in batch:
            assert 0 <= one.staleness(version) <= max_staleness
            assert one.ordinal in ready
            del open_groups[one.ordinal]
        trained += [one.ordinal for one in batch]
    assert not open_groups, "nothing was begun past the last step"
    assert sorted(trained) == list(range(steps * wanted))
    if order is IN_ORDER:
        assert trained == sorted(trained)


def test_as_many_are_begun_as_the_steps_within_the_bound_have_room_for() -> None:
    assert room(0, wanted=4, steps_left=10, max_staleness=0) == 4
    assert room(0, wanted=4, steps_left=10, max_staleness=2) == 12
    assert room(8, wanted=4, steps_left=10, max_staleness=2) == 4
    assert room(8, wanted=4, steps_left=2, max_staleness=2) == 0, "two steps are left"
    assert room(20, wanted=4, steps_left=10, max_staleness=2) == 0
    assert room(4, wanted=4, steps_left=10, max_staleness=2, most=6) == 2
    assert room(0, wanted=4, steps_left=1, max_staleness=2, most=6) == 4


@pytest.mark.parametrize(
    ("order", "expected"),
    [(IN_ORDER, None), (READY_FIRST, [1, 2])],
)
def test_ready_first_does_not_wait_for_the_next_prompt(order: StalenessOrder, expected: list[int] | None) -> None:
    groups = [group(0, 3, complete=False), group(1, 3), group(2, 3), group(3, 3)]
    batch = next_batch(groups, {1, 2, 3}, 2, version=3, max_staleness=1, order=order)
    assert (batch and [one.ordinal for one in batch]) == expected


def test_ready_first_waits_for_those_that_would_be_too_old() -> None:
    groups = [group(0, 2, complete=False), group(1, 2), group(2, 3), group(3, 3)]
    assert next_batch(groups, {1, 2, 3}, 2, version=3, max_staleness=1, order=READY_FIRST) is None
    batch = next_batch(groups, {0, 1, 2, 3}, 2, version=3, max_staleness=1, order=READY_FIRST)
    assert batch is not None
    assert [one.ordinal for one in batch] == [0, 1]


@pytest.mark.parametrize("order", StalenessOrder)
def test_a_reward_that_is_waited_for_is_waited_for(order: StalenessOrder) -> None:
    groups = [group(0, 0), group(1, 0)]
    assert next_batch(groups, {0}, 2, version=0, max_staleness=0, order=order) is None


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 6))
def test_equal_groups_are_dealt_as_a_step_of_its_own_deals_them(groups: int, engines: int, size: int) -> None:
    assert ranges([size] * groups, engines) == [list(share) for share in contiguous(range(groups), engines)]


@given(st.lists(st.integers(1, 8), max_size=40), st.integers(1, 6))
def test_engines_have_about_as_many_requests_each(sizes: list[int], engines: int) -> None:
    held = ranges(sizes, engines)
    assert [place for places in held for place in places] == list(range(len(sizes))), "each once, side by side"
    loads = [sum(sizes[place] for place in places) for places in held]
    assert max(loads, default=0) - sum(sizes) / engines < max(sizes, default=1)
