"""Normalised and bounded rewards, whitened and bounded advantages, against Python's statistics."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.spec import AlgorithmSpec, RewardScope, RewardShapingSpec
from rljob_worker.algorithms import get_algorithm, step_advantages
from rljob_worker.algorithms.shaping import shape_advantages, shape_rewards

REWARDS = st.integers(2, 5).flatmap(
    lambda group: st.lists(st.lists(st.floats(-9, 9, width=32), min_size=group, max_size=group), min_size=2, max_size=4)
)
SCOPES = [None, *RewardScope]


def over(rewards: list[list[float]], scope: RewardScope | None, function, nothing: float) -> list[float]:
    """The statistic that holds for each group."""
    if scope is None:
        return [nothing] * len(rewards)
    if scope is RewardScope.BATCH:
        return [function([r for group in rewards for r in group])] * len(rewards)
    return [function(group) for group in rewards]


@pytest.mark.parametrize("center", SCOPES)
@pytest.mark.parametrize("scale", SCOPES)
@given(rewards=REWARDS, clip=st.one_of(st.none(), st.floats(0.1, 3)))
@settings(max_examples=40)
def test_rewards(
    center: RewardScope | None, scale: RewardScope | None, rewards: list[list[float]], clip: float | None
) -> None:
    shaped = shape_rewards(torch.tensor(rewards), RewardShapingSpec(center=center, scale=scale, clip=clip))
    means = over(rewards, center, statistics.fmean, 0.0)
    deviations = over(rewards, scale, statistics.stdev, 1.0 - 1e-6)
    bound = math.inf if clip is None else clip
    expected = [
        [min(max((r - mean) / (deviation + 1e-6), -bound), bound) for r in group]
        for group, mean, deviation in zip(rewards, means, deviations)
    ]
    torch.testing.assert_close(shaped, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_a_single_reward_has_no_deviation() -> None:
    for scope in RewardScope:
        spec = RewardShapingSpec(center=scope, scale=scope)
        assert shape_rewards(torch.tensor([[3.0]]), spec).tolist() == [[0.0]]


@given(rewards=REWARDS, data=st.data())
@settings(max_examples=60)
def test_whitened_advantages_have_mean_0_and_variance_1_over_tokens(
    rewards: list[list[float]], data: st.DataObject
) -> None:
    lengths = data.draw(
        st.lists(
            st.lists(st.integers(1, 9), min_size=len(rewards[0]), max_size=len(rewards[0])),
            min_size=len(rewards), max_size=len(rewards),
        )
    )  # fmt: skip
    shaped = shape_advantages(torch.tensor(rewards), torch.tensor(lengths), AlgorithmSpec(whitenAdvantages=True))
    flat = [(a, n) for group, counts in zip(rewards, lengths) for a, n in zip(group, counts)]
    tokens = [a for a, n in flat for _ in range(n)]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    expected = [(a - mean) / math.sqrt(variance + 1e-8) for a, _ in flat]
    torch.testing.assert_close(shaped.flatten(), torch.tensor(expected), rtol=1e-3, atol=1e-3)


def test_advantages_are_bounded_after_they_were_whitened() -> None:
    advantages, lengths = torch.tensor([[0.0, 0.0], [0.0, 10.0]]), torch.ones(2, 2, dtype=torch.int64)
    shaped = shape_advantages(advantages, lengths, AlgorithmSpec(whitenAdvantages=True, advantageClip=0.2))
    torch.testing.assert_close(shaped, torch.tensor([[-0.2, -0.2], [-0.2, 0.2]]))
    assert shape_advantages(advantages, lengths, AlgorithmSpec()).tolist() == advantages.tolist()


def test_one_token_cannot_be_whitened() -> None:
    spec = AlgorithmSpec(whitenAdvantages=True)
    assert shape_advantages(torch.tensor([[3.0]]), torch.tensor([[1]]), spec).tolist() == [[3.0]]


@given(REWARDS)
@settings(max_examples=60)
def test_leave_one_out(rewards: list[list[float]]) -> None:
    result = get_algorithm("rloo").advantages(torch.tensor(rewards), AlgorithmSpec())
    expected = [[r - (math.fsum(g) - r) / (len(g) - 1) for r in g] for g in rewards]
    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_advantages_without_a_group() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    for name in ("reinforce", "reinforce_pp"):
        assert get_algorithm(name).advantages(rewards, AlgorithmSpec()).tolist() == rewards.tolist()
    for name in ("dr_grpo", "reinforce_pp_baseline"):
        assert get_algorithm(name).advantages(rewards, AlgorithmSpec(name=name)).tolist() == [[0.5, -0.5], [0.0, 0.0]]


@pytest.mark.parametrize("scope", SCOPES)
def test_groups_of_several_sizes_are_each_compared_with_their_own(scope: RewardScope | None) -> None:
    spec = AlgorithmSpec(name="dr_grpo", rewards={"center": scope, "scale": scope})
    rewards, sizes = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.25, 3.0, 1.0]), [2, 3, 2]
    result = step_advantages(get_algorithm("dr_grpo"), rewards, sizes, torch.ones(7, dtype=torch.int64), spec)
    groups = [group.tolist() for group in rewards.split(sizes)]
    means, deviations = over(groups, scope, statistics.fmean, 0.0), over(groups, scope, statistics.stdev, 1.0 - 1e-6)
    shaped = [[(r - m) / (d + 1e-6) for r in group] for group, m, d in zip(groups, means, deviations)]
    expected = [r - statistics.fmean(group) for group in shaped for r in group]
    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-5, atol=1e-6)
