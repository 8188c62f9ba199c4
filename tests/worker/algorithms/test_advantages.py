from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.spec import AlgorithmSpec
from rljob_worker.algorithms import get_algorithm, group_advantages, zero_variance

REWARD = st.floats(-100, 100, width=32)


def groups(min_size: int = 2) -> st.SearchStrategy[list[list[float]]]:
    return st.integers(min_size, 9).flatmap(
        lambda size: st.lists(st.lists(REWARD, min_size=size, max_size=size), min_size=1, max_size=5)
    )


def reference_advantages(rewards: list[float], by_std: bool) -> list[float]:
    """GRPO's formula in Python floats, with the n-1 variance."""
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)
    return [(r - mean) / (math.sqrt(variance) + 1e-6 if by_std else 1.0) for r in rewards]


@given(groups(), st.booleans())
@settings(max_examples=100)
def test_equals_the_formula(rewards: list[list[float]], by_std: bool) -> None:
    expected = torch.tensor([reference_advantages(group, by_std) for group in rewards], dtype=torch.float64)
    result = group_advantages(torch.tensor(rewards), by_std)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


@given(groups(), st.booleans())
@settings(max_examples=100)
def test_each_group_averages_to_zero(rewards: list[list[float]], by_std: bool) -> None:
    advantages = group_advantages(torch.tensor(rewards), by_std).double()
    bound = 1e-6 * advantages.abs().amax(dim=1).clamp(min=1e-6) * len(rewards[0])
    assert (advantages.sum(dim=1).abs() <= bound).all()


@given(groups(), st.floats(0.125, 64), st.floats(-8, 8))
@settings(max_examples=100)
def test_scaling_and_shifting_rewards_changes_nothing(rewards: list[list[float]], scale: float, shift: float) -> None:
    exact = torch.tensor(rewards, dtype=torch.float64)
    spread = exact.std(dim=1)
    visible = (spread > 0.1).unsqueeze(1)
    original = group_advantages(exact, True)
    moved = group_advantages(exact * scale + shift, True)
    # The epsilon beside the deviation is what breaks the invariance, by its share of the smaller deviation.
    torch.testing.assert_close(torch.where(visible, original, 0), torch.where(visible, moved, 0), rtol=1e-3, atol=1e-4)


def test_standard_deviation_is_the_unbiased_one() -> None:
    advantages = group_advantages(torch.tensor([[1.0, 0, 0, 0, 0, 0, 0, 0]]), True)
    biased = (1 - 1 / 8) / math.sqrt(7 / 64)
    assert advantages[0, 0].item() == pytest.approx(biased * math.sqrt(7 / 8), rel=1e-4)
    assert advantages[0, 0].item() != pytest.approx(biased, rel=1e-2)


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_equal_rewards_give_exactly_zero(size: int, by_std: bool) -> None:
    # Three times 0.1 does not average to itself in float64.
    for dtype in (torch.float32, torch.float64):
        assert (group_advantages(torch.full((3, size), 0.1, dtype=dtype), by_std) == 0).all()


def test_counts_groups_without_signal() -> None:
    nan, inf = math.nan, math.inf
    rewards = torch.tensor([[0.1, 0.1], [0.0, 1.0], [nan, nan], [inf, inf], [0.0, -0.0]])
    assert zero_variance(rewards).sum().item() == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_not_hidden(bad: float) -> None:
    advantages = group_advantages(torch.tensor([[bad, bad, bad], [0.0, 1.0, 2.0]]), True)
    assert not advantages[0].isfinite().any()
    assert advantages[1].isfinite().all()


def test_flat_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="prompts, samples per prompt"):
        group_advantages(torch.zeros(4), True)


def test_registry() -> None:
    grpo = get_algorithm("grpo")
    rewards = torch.tensor([[0.0, 1.0, 3.0]])
    for by_std in (True, False):
        spec = AlgorithmSpec.model_validate({"normalizeByStd": by_std})
        assert torch.equal(grpo.advantages(rewards, spec), group_advantages(rewards, by_std))
    assert not grpo.needs_old_log_probs(updates_per_step=1)
    assert grpo.needs_old_log_probs(updates_per_step=2)
    assert not grpo.needs_reference(AlgorithmSpec())
    assert grpo.needs_reference(AlgorithmSpec.model_validate({"kl": {"coefficient": 0.1}}))
    assert grpo.needs_reference(AlgorithmSpec.model_validate({"kl": {"monitor": True}}))
    with pytest.raises(ValueError, match=r"spec\.algorithm\.name: 'gpro' is not built; available: .*grpo"):
        get_algorithm("gpro")
