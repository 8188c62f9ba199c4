"""Groups that are too old before they are complete: none is trained on so, none is lost, and no step waits for ever."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.spec.rollout import StalenessLimit, StalenessOrder
from rljob_worker.flow import Episode, Finish, Group, TokenStream
from rljob_worker.flow.admission import next_batch, room
from rljob_worker.flow.limits import expired, is_waited_for, oldest_trained
from rljob_worker.flow.partial import overdue

WAIT, MASK, DISCARD = StalenessLimit
READY_FIRST = StalenessOrder.READY_FIRST


def group(ordinal: int, *versions: int, complete: bool = True, renewed: bool = False) -> Group:
    stream = TokenStream.of_prompt([7])
    for version in versions:
        stream = stream.append_sampled([1], [-0.5], version=version)
    return Group(ordinal, 0, (Episode(ordinal, 0, stream, Finish.STOP if complete else None),), renewed)


@given(
    seed=st.integers(0, 2**32),
    wanted=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    steps=st.integers(1, 14),
    limit=st.sampled_from([MASK, DISCARD]),
    slow=st.floats(0, 0.9),
)
def test_a_whole_run_trains_on_each_prompt_once_and_on_no_token_that_is_too_old(
    seed: int, wanted: int, max_staleness: int, steps: int, limit: StalenessLimit, slow: float
) -> None:
    """A step is taken as soon as one can be made; some groups hardly ever get on, and are complete in the end."""
    chance, trained, begun, again = random.Random(seed), list[int](), 0, set[int]()
    open_groups: dict[int, Group] = {}
    ready: set[int] = set()
    lazy: set[int] = set()
    for version in range(steps):
        for one in expired(open_groups.values(), version, max_staleness, limit):
            assert one.ordinal not in again, "sampled a third time"
            again.add(one.ordinal)
            ready.discard(one.ordinal)
            begun_again = group(one.ordinal, complete=False, renewed=True)
            open_groups[one.ordinal] = replace(begun_again, admitted_version=version)
        for _ in range(room(len(open_groups), wanted, steps - version, max_staleness)):
            open_groups[begun] = replace(group(begun, complete=False), admitted_version=version)
            lazy |= {begun} if chance.random() < slow else set()
            begun += 1
        rounds = 0
        while (batch := _batch(open_groups, ready, wanted, version, max_staleness, limit)) is None:
            growing = [one for one in open_groups.values() if one.ordinal not in ready]
            assert growing, "all are complete, and no batch can be made of them"
            for one in growing:
                episode = one.episodes[0]
                done = chance.random() < (0.02 * rounds if one.ordinal in lazy else 0.5)
                grown = replace(
                    episode,
                    stream=episode.stream.append_sampled([1], [-0.5], version=version),
                    finish=Finish.STOP if done else None,
                )
                open_groups[one.ordinal] = replace(one, episodes=(grown,))
                ready |= {one.ordinal} if done else set()
            rounds += 1
        assert len(batch) == wanted
        for one in batch:
            learned = [
                v for v in one.episodes[0].stream.versions[1:] if v >= oldest_trained(version, max_staleness, limit)
            ]
            assert learned, "nothing is learned from it"
            assert version - min(learned) <= max_staleness
            del open_groups[one.ordinal]
        trained += [one.ordinal for one in batch]
    assert not open_groups
    assert sorted(trained) == list(range(steps * wanted))


def _batch(
    open_groups: dict[int, Group], ready: set[int], wanted: int, version: int, max_staleness: int, limit: StalenessLimit
) -> list[Group] | None:
    waited_for = [one for one in open_groups.values() if is_waited_for(one, limit)]
    assert overdue(waited_for, wanted, version, max_staleness) is None
    return next_batch(open_groups.values(), ready, wanted, version, max_staleness, READY_FIRST, limit)


def test_a_step_does_not_wait_for_what_its_limit_takes() -> None:
    groups = [group(0, 2, complete=False), group(1, 2), group(2, 3), group(3, 3)]
    for limit, expected in ((WAIT, None), (MASK, [1, 2]), (DISCARD, [1, 2])):
        batch = next_batch(groups, {1, 2, 3}, 2, 3, 1, READY_FIRST, limit)
        assert (batch and [one.ordinal for one in batch]) == expected


@pytest.mark.parametrize("limit", [MASK, DISCARD])
def test_a_step_waits_for_what_was_sampled_again_and_takes_it_first(limit: StalenessLimit) -> None:
    groups = [group(0, 2, complete=False, renewed=True), group(1, 1), group(2, 3)]
    assert next_batch(groups, {1, 2}, 2, 3, 1, READY_FIRST, limit) is None
    groups[0] = group(0, 2, renewed=True)
    batch = next_batch(groups, {0, 1, 2}, 1, 3, 1, READY_FIRST, limit)
    assert batch is not None
    assert [one.ordinal for one in batch] == [0], "an older one that need not be waited for goes before it"


def test_what_no_step_can_train_on_is_sampled_again() -> None:
    young, old, mixed = group(0, 3), group(1, 1), group(2, 1, 3)
    growing = group(3, 1, complete=False)
    groups = [young, old, mixed, growing]
    assert expired(groups, 3, 1, WAIT) == []
    assert expired(groups, 3, 1, DISCARD) == [old, mixed, growing]
    assert expired(groups, 3, 1, MASK) == [old], "others have tokens that are young enough, or will have"
    assert [oldest_trained(3, 1, limit) for limit in StalenessLimit] == [0, 2, 0]
