from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_worker.algorithms.gae import explained_variance, generalized_advantages, outcome_rewards
from rljob_worker.algorithms.value_loss import clipped_value_loss

NUMBER = st.floats(-8, 8, width=32)
STREAMS = st.lists(st.lists(st.tuples(NUMBER, NUMBER), max_size=9), min_size=1, max_size=5)
"""The reward of each sampled token, and the value before it."""


def reference(stream: list[tuple[float, float]], gamma: float, lam: float) -> list[float]:
    """The sum of the definition (arXiv 1506.02438 eq. 16), term by term in Python floats."""
    deltas = [
        reward + (gamma * stream[place + 1][1] if place + 1 < len(stream) else 0.0) - value
        for place, (reward, value) in enumerate(stream)
    ]
    return [
        math.fsum((gamma * lam) ** ahead * delta for ahead, delta in enumerate(deltas[place:]))
        for place in range(len(deltas))
    ]


@given(STREAMS, st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=150)
def test_equals_the_sum_of_the_definition(streams: list[list[tuple[float, float]]], gamma: float, lam: float) -> None:
    flat = [token for stream in streams for token in stream]
    rewards, values = (torch.tensor([token[i] for token in flat]) for i in (0, 1))
    found = generalized_advantages(rewards, values, torch.tensor(list(map(len, streams))), gamma=gamma, lam=lam)
    expected = [one for stream in streams for one in reference(stream, gamma, lam)]
    assert found.advantages.dtype == found.returns.dtype == torch.float32
    torch.testing.assert_close(found.advantages.double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.returns, found.advantages + values, rtol=1e-5, atol=2e-5)


def test_with_lambda_one_returns_are_the_rewards_that_follow_whatever_the_values() -> None:
    lengths = torch.tensor([3, 1, 2])
    rewards = torch.tensor([0.0, 0.0, 2.0, -1.0, 0.5, 1.0])
    found = generalized_advantages(rewards, torch.randn(6), lengths, gamma=1.0, lam=1.0)
    torch.testing.assert_close(found.returns, torch.tensor([2.0, 2.0, 2.0, -1.0, 1.5, 1.0]))


def test_the_value_is_of_the_state_before_its_token() -> None:
    """One token whose reward its value foretold: no advantage. Values shifted by a token would give some."""
    rewards, lengths = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([3])
    right = generalized_advantages(rewards, torch.tensor([0.25, 0.5, 1.0]), lengths, gamma=1.0, lam=0.0)
    torch.testing.assert_close(right.advantages, torch.tensor([0.25, 0.5, 0.0]))
    shifted = generalized_advantages(rewards, torch.tensor([0.5, 1.0, 0.0]), lengths, gamma=1.0, lam=0.0)
    assert shifted.advantages[2] == 1.0


def test_the_reward_is_at_the_last_sampled_token() -> None:
    rewards = outcome_rewards(torch.tensor([1.0, 9.0, -2.0]), torch.tensor([2, 0, 1]))
    assert rewards.tolist() == [0.0, 1.0, -2.0]


@given(st.lists(st.tuples(NUMBER, NUMBER, NUMBER), min_size=1, max_size=20), st.just(0.0) | st.floats(0.01, 2))
@settings(max_examples=150)
def test_the_value_loss_equals_a_loop(tokens: list[tuple[float, float, float]], clip: float) -> None:
    values, old, returns = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    loss, clipped = clipped_value_loss(values, old, returns, clip)
    for place, (value, before, target) in enumerate(tokens):
        expected, decided = 0.5 * (value - target) ** 2, False
        if clip:
            near = before + min(max(value - before, -clip), clip)
            decided = 0.5 * (near - target) ** 2 > expected
            expected = max(expected, 0.5 * (near - target) ** 2)
        assert float(loss[place]) == pytest.approx(expected, abs=1e-12)
        assert bool(clipped[place]) is decided


def test_a_value_that_the_clip_holds_has_no_gradient() -> None:
    values = torch.tensor([0.5, 0.1], requires_grad=True)
    loss, clipped = clipped_value_loss(values, torch.zeros(2), torch.ones(2), 0.2)
    loss.sum().backward()
    assert values.grad is not None
    # The first moved 0.5 towards its return already, of 0.2 that count.
    assert clipped.tolist() == [True, False]
    torch.testing.assert_close(values.grad, torch.tensor([0.0, -0.9]))


def test_explained_variance_is_of_the_spread_alone() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns + 5, returns) == pytest.approx(1)
    assert explained_variance(torch.full((4,), 1.5), returns) == pytest.approx(0)
    assert explained_variance(-returns, returns) == pytest.approx(-3)
    assert math.isnan(explained_variance(returns, torch.ones(4)))
    assert math.isnan(explained_variance(torch.empty(0), torch.empty(0)))
