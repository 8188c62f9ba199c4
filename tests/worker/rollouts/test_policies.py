"""Policies, each as a function of groups: what begins, which engine gets it, what is trained on, what is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_run_folder import job

from rljob_api.spec import RewardSpec, RLJobSpec
from rljob_worker.engine.seeds import request_seed
from rljob_worker.errors import JobError
from rljob_worker.flow import Decision, Group
from rljob_worker.flow.turns import Opening
from rljob_worker.rollouts.batch import oversampling_metrics, too_few_groups
from rljob_worker.rollouts.policies import policy_of
from rljob_worker.rollouts.policies.base import Fleet
from rljob_worker.rollouts.policies.overlapped import OverlappedPolicy
from rljob_worker.rollouts.policies.partial import PartialPolicy
from rljob_worker.rollouts.policies.tail import TailPolicy
from rljob_worker.rollouts.policies.whole import WholePolicy, contiguous, in_shares
from rljob_worker.rollouts.step import Step
from rljob_worker.types import Cut, Generation, Prompt, Quota, RewardResult

TWO = Fleet(2, 8)


def spec(mode: str = "Colocated", **rollout: Any) -> RLJobSpec:
    block = {"promptsPerStep": 3, "samplesPerPrompt": 2, "maxResponseTokens": 8, **rollout}
    return job(rollout=block, mode=mode, steps=20, seed=7).spec


def prompt(ordinal: int) -> Prompt:
    return Prompt(f"p{ordinal}", "s", "", (1, 2), None, RewardSpec(name="match"))


def begun(ordinal: int, version: int = 0, samples: int = 2) -> Group:
    return Group.begun(ordinal, prompt(ordinal), samples, 100 * ordinal, version)


def grown(ordinal: int, version: int = 0, end: str = "", tokens: int = 1, samples: int = 2) -> Group:
    """A group each of whose samples has tokens of one version."""
    group = begun(ordinal, version, samples)
    for sample in range(samples):
        part = Generation(np.arange(tokens), np.full(tokens, -0.1, np.float32), end)
        group = group.extended({sample: part}, version)
    return group


def ready(ordinal: int, rewards: Sequence[float] = (0.0, 1.0), version: int = 0, tokens: int = 1) -> Group:
    group = grown(ordinal, version, "stop", tokens, len(rewards))
    return replace(group, results=tuple(map(RewardResult, rewards)))


def ordinals(groups: Sequence[Group]) -> list[int]:
    return [one.ordinal for one in groups]


# --- shares ------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 12))
def test_engines_get_their_shares_in_order_as_evenly_as_can_be(count: int, engines: int) -> None:
    groups = [begun(ordinal) for ordinal in range(count)]
    assignment = in_shares(groups, Fleet(engines, 2), when_free=False)
    assert (assignment.waiting, assignment.cuts) == ((), None)
    assert [ordinal for share in assignment.held for ordinal in share] == list(range(count))
    sizes = [len(share) for share in assignment.held]
    assert len(sizes) == engines
    assert max(sizes) - min(sizes) <= 1
    assert in_shares(groups, Fleet(engines, 2 * max(sizes)), when_free=True) == assignment, "all fit at once"
    assert contiguous(range(count), engines) == [range(*slice_of(share)) for share in assignment.held]


def slice_of(share: Sequence[int]) -> tuple[int, int]:
    return (share[0], share[-1] + 1) if share else (0, 0)


@given(st.data(), st.integers(1, 40), st.integers(1, 6), st.integers(1, 6))
def test_the_longest_begin_where_an_engine_has_more_than_it_runs_at_once(
    data: st.DataObject, count: int, engines: int, room: int
) -> None:
    longest = {f"p{ordinal}": data.draw(st.integers(0, 5)) for ordinal in range(0, count, 2)}
    groups = [begun(ordinal) for ordinal in range(count)]
    assignment = in_shares(groups, Fleet(engines, 2 * room + 1, longest), when_free=True)
    if -(-count // engines) <= room:
        assert not assignment.waiting
        return
    turns = max(len(share) for share in assignment.held)
    order = [share[turn] for turn in range(turns) for share in assignment.held if turn < len(share)]
    order += assignment.waiting
    usual = sum(longest.values()) / max(1, len(longest))
    assert order == sorted(range(count), key=lambda ordinal: (-longest.get(f"p{ordinal}", usual), ordinal))
    if assignment.waiting:
        assert [len(share) for share in assignment.held] == [room] * engines, "an engine idles while groups wait"


def test_an_engine_runs_a_group_at_least() -> None:
    groups = [begun(ordinal, samples=8) for ordinal in range(5)]
    assignment = in_shares(groups, Fleet(2, 4), when_free=True)
    assert (assignment.held, assignment.waiting) == ([[0], [1]], [2, 3, 4])


# --- whole -------------------------------------------------------------------------------------


def test_each_job_has_its_policy() -> None:
    apart: dict[str, Any] = {"profile": "cpu", "trainer": {"devicesPerNode": 1}, "rollout": {"devicesPerNode": 1}}
    assert isinstance(policy_of(spec()), WholePolicy)
    assert isinstance(policy_of(spec(partial={"factor": 2})), PartialPolicy)
    assert isinstance(policy_of(spec(tail={"deferLongest": 0.4})), TailPolicy)
    for mode, kind in (("Disaggregated", WholePolicy), ("Async", OverlappedPolicy)):
        assert type(policy_of(job(mode=mode, resources=apart).spec)) is kind


def test_a_whole_step_begins_what_it_trains_on_each_with_a_seed_of_its_own() -> None:
    policy, step = WholePolicy(spec()), Step(5, 4)
    assert policy.room(step, []) == 3
    seeds = []
    for ordinal in (12, 13, 14):
        seeds.append(policy.seed(step, ordinal))
        step.drawn += 1
    assert seeds == [request_seed(7, 5, place, 0) for place in range(3)]
    assert len({request_seed(job_seed, number, 0, 0) for job_seed in (7, 8) for number in (5, 6)}) == 4
    selection = policy.select(step, [ready(12), ready(13, (0, 0)), ready(14)])
    assert (ordinals(selection.trained), selection.filtered, selection.left) == ([12, 13, 14], [], ())


def test_the_first_groups_by_number_whose_rewards_differ_are_trained_on() -> None:
    rewards = {7: [0, 1], 3: [0.5, 0.5], 4: [1, 0], 9: [0, 0], 8: [math.nan, math.nan], 11: [0, 1], 12: [1, 1]}
    policy = WholePolicy(spec(oversampling={"filter": "ZeroVariance", "factor": 2, "limit": 9}))
    groups = [ready(ordinal, rewards[ordinal], tokens=9 if ordinal in (3, 4) else 2) for ordinal in sorted(rewards)]
    step = Step(5, 4, drawn=7, rounds=2)
    selection = policy.select(step, groups)
    taken = {
        Decision.FILTERED: selection.filtered, Decision.TRAINED: selection.trained, Decision.SURPLUS: selection.surplus
    }  # fmt: skip
    assert {what: ordinals(of) for what, of in taken.items()} == {
        "filtered": [3, 9, 12], "trained": [4, 7, 8], "surplus": [11]
    }  # fmt: skip
    for what, of in taken.items():
        for group in of:
            step.take(group, what, prompt(group.ordinal))
    assert oversampling_metrics(step) == {
        "rollout/rounds": 2.0,
        "rollout/filtered_groups": 3.0,
        "rollout/filtered_tokens": 18.0 + 4.0 + 4.0,
        "rollout/surplus_groups": 1.0,
        "rollout/surplus_tokens": 4.0,
    }


def test_a_group_must_pass_the_filter_and_the_function_which_is_asked_about_it_once() -> None:
    policy, step = WholePolicy(spec(oversampling={"filter": "ZeroVariance", "function": "f.g:h"})), Step(5, 4)
    groups = [
        replace(ready(2), kept=True), ready(3, (1, 1)), replace(ready(4), kept=False), ready(5), grown(6),
        replace(ready(7, (1, 1)), kept=True),
    ]  # fmt: skip
    assert ordinals(policy.unasked(groups)) == [5], (
        "neither what the filter takes, nor what was decided, nor what grows"
    )
    selection = policy.select(step, groups)
    assert (ordinals(selection.filtered), selection.passed) == ([3, 4, 7], 2)
    alone = WholePolicy(spec(oversampling={"function": "f.g:h"}))
    assert ordinals(alone.unasked(groups)) == [3, 5]
    assert ordinals(alone.select(step, groups).filtered) == [4]
    assert [Group.from_json(one.as_json()).kept for one in groups] == [True, None, False, None, None, True]
    assert replace(ready(2), kept=True).sampled_again(5).kept is None, "other samples are another matter"


def test_a_step_whose_function_left_too_many_out_says_so() -> None:
    oversampling = {"filter": "ZeroVariance", "function": "f.g:h", "limit": 2}
    rollout = job(rollout={"promptsPerStep": 4, "oversampling": oversampling}).spec.rollout
    step = Step(5, 4, drawn=8, rounds=3, passed=1)
    step.take(replace(ready(0), kept=False), Decision.FILTERED, prompt(0))
    said = "1 of the 4 groups that it needs passed ZeroVariance and f.g:h; the function left 1 out: the task"
    assert said in too_few_groups(step, rollout)
    step.take(ready(1, (1, 1)), Decision.FILTERED, prompt(1))
    said = "the function left 1 out, and the rewards of others are all equal (1 x 1): the task"
    assert said in too_few_groups(step, rollout)
    assert oversampling_metrics(step)["rollout/filtered_by_function_groups"] == 1.0


def test_a_round_begins_what_is_missing_up_to_the_limit() -> None:
    policy, step = WholePolicy(spec(oversampling={"filter": "ZeroVariance", "factor": 1.5, "limit": 2})), Step(1, 0)
    assert policy.room(step, []) == 5
    step.drawn = 5
    groups = [ready(0), ready(1, (1, 1)), ready(2), ready(3, (0, 0)), ready(4, (0, 0))]
    selection = policy.select(step, groups)
    assert (selection.trained, ordinals(selection.filtered), selection.passed) == ((), [1, 3, 4], 2)
    assert selection.left is None, "what passed waits for the next round"
    step.passed = selection.passed
    assert policy.room(step, groups) == 1
    assert not policy.exhausted(step, groups)
    step.drawn = 6
    assert policy.exhausted(step, groups)
    step.given_back = 1
    assert not policy.exhausted(step, groups)
    step.passed = 0
    assert policy.room(step, groups) == 1, "another in the place of what was lost"


def test_a_step_whose_filter_took_too_many_groups_says_what_they_scored() -> None:
    rollout = job(rollout={"promptsPerStep": 4, "oversampling": {"filter": "ZeroVariance", "limit": 2}}).spec.rollout
    rewards: list[list[float]] = [[0, 0], [0, 1], [1, 1], [0, 0]]
    step = Step(5, 4, drawn=8, rounds=3, passed=1)
    for ordinal in (0, 2, 3):
        step.take(ready(ordinal, rewards[ordinal]), Decision.FILTERED, prompt(ordinal))
    assert too_few_groups(step, rollout).startswith(
        "spec.rollout.oversampling: step 5 drew 8 prompts in 3 rounds (limit 2 times promptsPerStep), and 1 of the 4 "
        "groups that it needs passed ZeroVariance; the others' rewards are all equal (2 x 0, 1 x 1):"
    )


def test_groups_of_another_policy_are_forgotten() -> None:
    assert WholePolicy(spec()).begin(Step(2, 1), [grown(3)]).groups == ()


# --- partial -----------------------------------------------------------------------------------


def test_partial_rollout_keeps_its_places_filled_and_the_rest_goes_on() -> None:
    policy, step = PartialPolicy(spec(partial={"factor": 2}, staleness={"max": 2})), Step(3, 2)
    groups = [grown(0, 1), grown(1, 2, "stop"), begun(2, 2)]
    assert policy.room(step, groups) == 3
    assert ordinals(policy.begin(step, groups).groups) == [0, 1, 2]
    assignment = policy.assign(step, [*groups, begun(3, 2), begun(4, 2), begun(5, 2)], TWO)
    assert assignment.held == [[0, 3, 5], [2, 4]]
    # One is complete already, of the three that are wanted.
    assert assignment.cuts == [
        Cut((Quota(2, frozenset({0, 3, 5})),)),
        Cut((Quota(1, frozenset({2, 4})),)),
    ]
    few = policy.select(step, [ready(1), ready(2), grown(0)])
    assert (few.trained, few.passed, few.left) == ((), 2, None)
    selection = policy.select(step, [grown(0), ready(1, version=2), ready(2, version=1), ready(3, version=2), ready(4)])
    assert (ordinals(selection.trained), selection.left, selection.surplus) == ([1, 2, 4], None, ())


def test_an_engine_that_is_to_complete_nothing_stops_at_once() -> None:
    policy, step = PartialPolicy(spec(partial={"factor": 2}, staleness={"max": 2})), Step(1, 0)
    assignment = policy.assign(step, [grown(0, 0, "stop"), grown(1, 0, "stop"), begun(2)], TWO)
    assert assignment.held == [[2], ()]
    assert assignment.cuts is not None
    assert assignment.cuts[1] == Cut(())


@pytest.mark.parametrize("mode", ["Colocated", "Async"])
def test_what_cannot_be_trained_on_in_time_is_refused(mode: str) -> None:
    block = {"staleness": {"max": 1}} | ({"partial": {"factor": 2}} if mode == "Colocated" else {})
    policy = policy_of(spec(mode, **block))
    with pytest.raises(JobError, match=r"prompt 0 has tokens of weights 2 and cannot be trained on within .*max 1 of"):
        policy.assign(Step(5, 4), [grown(0, 2), begun(1, 4)], TWO)


# --- tail --------------------------------------------------------------------------------------


def test_a_short_step_defers_what_grows_and_forgets_what_is_too_many() -> None:
    policy, step = TailPolicy(spec(tail={"deferLongest": 0.4})), Step(3, 2)
    begin = policy.begin(step, [replace(grown(0, 1), deferred_at=2)])
    assert (begin.long, begin.groups[0].num_sampled, begin.groups[0].admitted_version) == (False, 0, 2)
    assert policy.room(step, begin.groups) == 5
    groups = [*begin.groups, *(begun(ordinal, 2) for ordinal in range(1, 6))]
    assignment = policy.assign(step, groups, TWO)
    assert assignment.held == [[1, 3, 5], [2, 4]]
    assert assignment.cuts is not None
    assert sum(quota.least for cut in assignment.cuts for quota in cut.quotas) == 3
    done = [groups[0], ready(1), ready(2), grown(3, 2), ready(4), ready(5)]
    selection = policy.select(step, done)
    assert (ordinals(selection.trained), ordinals(selection.surplus)) == ([1, 2, 4], [5])
    assert ordinals(selection.deferred) == [3]
    assert selection.deferred[0].num_sampled == 2
    assert selection.left is not None
    assert [(one.ordinal, one.deferred_at, one.num_sampled) for one in selection.left] == [
        (0, 2, 0), (3, 3, 0), (5, None, 0)
    ]  # fmt: skip


def test_a_long_step_waits_for_all_it_has() -> None:
    policy, step = TailPolicy(spec(tail={"deferLongest": 0.4})), Step(4, 3)
    waiting = [replace(begun(ordinal), deferred_at=1 + ordinal % 2) for ordinal in range(4)]
    begin = policy.begin(step, waiting)
    step.long = begin.long
    assert begin.long
    assert policy.room(step, begin.groups) == 0
    assignment = policy.assign(step, begin.groups, TWO)
    assert sorted(ordinal for share in assignment.held for ordinal in share) == [0, 1, 2]
    selection = policy.select(step, [ready(0), ready(1), ready(2), replace(begun(3), deferred_at=2)])
    assert (ordinals(selection.trained), selection.deferred) == ([0, 1, 2], [])
    assert selection.left is not None
    assert [(one.ordinal, one.deferred_at) for one in selection.left] == [(3, 2)]


# --- overlapped --------------------------------------------------------------------------------


def overlapped(**staleness: Any) -> OverlappedPolicy:
    return OverlappedPolicy(spec("Async", staleness={"max": 1, **staleness}))


def test_generation_runs_ahead_as_far_as_the_bound_allows_with_the_noise_of_steps_that_draw_their_own() -> None:
    policy = overlapped()
    assert policy.room(Step(1, 0), []) == 6
    assert policy.room(Step(2, 1), [begun(4)]) == 5
    assert policy.room(Step(20, 19), []) == 3, "nothing is begun past the last step"
    whole, step = WholePolicy(spec()), Step(2, 1, drawn=1)
    assert policy.seed(Step(1, 0), 4) == whole.seed(step, 4)


def test_groups_are_trained_on_in_order_each_once_it_is_ready() -> None:
    policy, step = overlapped(order="InOrder"), Step(2, 1)
    groups = [ready(3), ready(4), grown(5), ready(6)]
    assert policy.select(step, groups).trained == ()
    assert ordinals(policy.select(step, [ready(3), ready(4), ready(5), ready(6)]).trained) == [3, 4, 5]


def test_ready_groups_are_trained_on_first_where_the_others_are_young_enough() -> None:
    policy, step = overlapped(order="ReadyFirst"), Step(2, 1)
    selection = policy.select(step, [grown(3, 1), ready(4), ready(5, version=1), ready(6)])
    assert (ordinals(selection.trained), selection.left, selection.passed) == ([4, 5, 6], None, 3)
    assert policy.select(step, [grown(3, 0), ready(4), ready(5), ready(6)]).trained == (), "3 would be too old next"


def test_a_group_that_is_too_old_is_never_trained_on() -> None:
    with pytest.raises(JobError, match=r"2 updates before the 2 of step 3; spec.rollout.staleness.max is 1"):
        overlapped(order="InOrder").select(Step(3, 2), [ready(0), ready(1, version=1), ready(2, version=1)])


def test_what_no_step_can_train_on_is_sampled_again() -> None:
    policy = overlapped(onLimit="Discard")
    old, young = grown(3, 0), grown(4, 2)
    begin = policy.begin(Step(3, 2), [old, young])
    assert begin.discarded == [old]
    renewed, kept = begin.groups
    assert (renewed.renewed, renewed.num_sampled, renewed.admitted_version, renewed.seed) == (True, 0, 2, old.seed)
    assert kept is young


def test_engines_share_episodes_by_samples_that_go_on_whether_environments_are_asked_or_not() -> None:
    start = Opening(5, "at 5"), (1, 2)
    said = Generation(np.array([5]), np.array([-0.5], np.float32), "stop")
    new = [Group.opened(ordinal, prompt(ordinal), [start, start], 0, 0) for ordinal in range(4)]
    asked = [new[0].extended({0: said, 1: said}, 0), *new[1:]]
    assert overlapped().assign(Step(1, 0), asked, TWO).held == [[0, 1], [2, 3]]


def test_engines_get_ranges_of_what_grows() -> None:
    assignment = overlapped().assign(Step(1, 0), [grown(0, 0, "stop"), *(begun(o) for o in range(1, 5))], TWO)
    assert (assignment.held, assignment.cuts) == ([[1, 2], [3, 4]], None)
