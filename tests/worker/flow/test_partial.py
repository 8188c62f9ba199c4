"""Whatever completes first: each step has its groups, none is trained on too late, none is lost or taken twice."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_worker.flow import Episode, Finish, Group, TokenStream
from rljob_worker.flow.partial import chosen, overdue, quotas, share, spread
from rljob_worker.types import Quota


def group(ordinal: int, version: int, complete: bool = False) -> Group:
    """A group of one sample whose oldest token is of this version."""
    stream = TokenStream.of_prompt([1]).append_sampled([2], [-1.0], version=version)
    return Group(ordinal, version, (Episode(ordinal, 0, stream, Finish.STOP if complete else None),))


def completed(of: Group) -> Group:
    return group(of.ordinal, of.oldest_version, complete=True)


@given(st.data(), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_every_group_is_trained_on_in_time(
    data: st.DataObject, wanted: int, max_staleness: int, engines: int, filtering: bool
) -> None:
    at_once = data.draw(st.integers(wanted, wanted * (max_staleness + 1)))
    opened, closed = 0, []
    groups: dict[int, Group] = {}
    for version in range(8):
        trained: list[Group] = []
        for _ in range(50):
            fresh = range(opened, opened + at_once - len(groups))
            groups |= {ordinal: group(ordinal, version) for ordinal in fresh}
            opened = fresh.stop
            assert overdue(groups.values(), wanted, version, max_staleness) is None
            _generate(data, groups, wanted, version, max_staleness, engines)
            for one in [one for one in groups.values() if one.complete and filtering]:
                if data.draw(st.integers(0, 3)) == 0:
                    del groups[one.ordinal]
                    closed.append(one.ordinal)
            complete = [one for one in groups.values() if one.complete]
            if len(complete) >= wanted:
                trained = chosen(complete, wanted)
                break
        if not trained:
            return
        assert len(trained) == wanted
        assert [one.ordinal for one in trained] == sorted(one.ordinal for one in trained)
        assert all(one.complete and one.staleness(version) <= max_staleness for one in trained)
        closed += [one.ordinal for one in trained]
        for one in trained:
            del groups[one.ordinal]
        assert all(one.staleness(version + 1) <= max_staleness for one in groups.values()), (
            "it was to be trained on in this step"
        )
    assert sorted(closed + list(groups)) == list(range(opened))


def _generate(
    data: st.DataObject, groups: dict[int, Group], wanted: int, version: int, max_staleness: int, engines: int
) -> None:
    """Each engine completes its groups in any order, until its quotas are met."""
    needed = quotas(list(groups.values()), wanted, version, max_staleness)
    growing = [one.ordinal for one in groups.values() if not one.complete]
    done: set[int] = set()
    for held in spread(growing, engines):
        mine = share(needed, frozenset(held))
        finished: set[int] = set()
        for ordinal in data.draw(st.permutations(held)):
            if all(len(quota.among & finished) >= quota.least for quota in mine):
                break
            finished.add(ordinal)
        assert all(len(quota.among & finished) >= quota.least for quota in mine), "an engine would never stop"
        done |= finished
    assert all(len(quota.among & done) >= quota.least for quota in needed)
    groups |= {ordinal: completed(groups[ordinal]) for ordinal in done}


def test_a_step_waits_for_as_many_of_the_old_ones_as_later_steps_have_no_room_for() -> None:
    old = [group(ordinal, 3) for ordinal in range(6)]
    new = [group(ordinal, 4) for ordinal in range(6, 8)]
    # Two steps, 4 and 5, have room for 8 groups, and the one with version 4 for four of the six.
    assert quotas(old + new, 4, 4, 2) == (
        Quota(2, frozenset(range(6))), Quota(4, frozenset(range(8)))
    )  # fmt: skip
    assert quotas([*map(completed, old[:3]), *old[3:], *new], 4, 4, 2) == (Quota(1, frozenset(range(3, 8))),)
    assert quotas([*map(completed, old[:4]), *old[4:], *new], 4, 4, 2) == ()
    assert quotas(old[:4] + new, 4, 4, 1) == (Quota(4, frozenset(range(4))), Quota(4, frozenset([0, 1, 2, 3, 6, 7])))
    assert quotas(new, 4, 4, 2) == (Quota(2, frozenset({6, 7})),), "a filter took the others"


def test_what_cannot_be_trained_on_in_time_is_named() -> None:
    groups = [group(ordinal, 3) for ordinal in range(5)]
    assert overdue(groups, 2, 4, 3) is None
    late = overdue(groups, 2, 4, 2)
    assert late is not None
    assert late.ordinal == 4
    assert overdue([group(9, 1)], 2, 4, 2) is not None


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_shares_of_the_engines_meet_the_quota_together(engines: int) -> None:
    needed = Quota(5, frozenset(range(10)))
    shares = [share([needed], frozenset(held)) for held in spread(range(10), engines)]
    assert sum(quota.least for of_engine in shares for quota in of_engine) >= 5
    assert max(quota.least for of_engine in shares for quota in of_engine) <= math.ceil(5 / engines) + 1
    assert share([needed], frozenset({77})) == ()


def test_the_oldest_are_trained_on_first_and_of_those_the_first_of_the_data() -> None:
    complete = [group(o, v, complete=True) for o, v in [(5, 2), (9, 1), (3, 2), (4, 2)]]
    assert [one.ordinal for one in chosen(complete, 3)] == [3, 4, 9]
