from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import algorithm_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.spec import AlgorithmSpec, KlEstimator, LossAggregation, TisSpec
from rljob_worker.algorithms import (
    MAX_METRICS,
    LossInputs,
    finish_metrics,
    policy_gradient_loss,
    token_weights,
)
from rljob_worker.algorithms.kl import kl_estimate
from rljob_worker.algorithms.losses import clipped_policy_loss
from rljob_worker.algorithms.sequences import Sequences
from rljob_worker.algorithms.tis import importance_weights

CONSTANT_LENGTH = 7
MODES = list(LossAggregation)


def make_spec(**values: Any) -> AlgorithmSpec:
    base: dict[str, Any] = {"entropyCoefficient": 0.03, "kl": {"coefficient": 0.2}, "tis": {"low": 0.7, "high": 1.6}}
    return AlgorithmSpec.model_validate(base | values)


def make_sequences(seed: int, lengths: tuple[int, ...] = (5, 1, 7, 3)) -> list[list[reference.Token]]:
    generator = torch.Generator().manual_seed(seed)

    def sequence(length: int) -> list[reference.Token]:
        new = -3 * torch.rand(length, generator=generator, dtype=torch.float64)
        noise = torch.randn(3, length, generator=generator, dtype=torch.float64) * 0.5
        entropy = torch.rand(length, generator=generator, dtype=torch.float64)
        advantage = torch.randn((), generator=generator, dtype=torch.float64).item()
        columns = (new, new + noise[0], new + noise[0] + noise[1], new + 3 * noise[2], entropy)
        return [reference.Token(*(c[t].item() for c in columns), advantage) for t in range(length)]

    return [sequence(length) for length in lengths]


def make_inputs(
    sequences: list[list[reference.Token]], spec: AlgorithmSpec, dtype: torch.dtype, **sizes: int
) -> LossInputs:
    """Padded to the longest sequence; padding holds values that would ruin every sum they got into."""
    width = max(len(sequence) for sequence in sequences) + 1
    mask = torch.tensor([[t < len(sequence) for t in range(width)] for sequence in sequences])

    def padded(field: str, poison: float) -> torch.Tensor:
        return torch.tensor(
            [[getattr(s[t], field) if t < len(s) else poison for t in range(width)] for s in sequences], dtype=dtype
        )

    totals = {"num_tokens": int(mask.sum()), "num_sequences": len(sequences)} | sizes
    return LossInputs(
        log_probs=padded("new", -math.inf).requires_grad_(),
        advantages=torch.tensor([sequence[0].advantage for sequence in sequences], dtype=dtype),
        mask=mask,
        weights=token_weights(mask, spec.aggregation, constant_length=CONSTANT_LENGTH, **totals),
        old_log_probs=padded("old", math.nan),
        rollout_log_probs=padded("rollout", 0.0),
        reference_log_probs=padded("reference", math.inf),
        entropy=padded("entropy", math.nan).requires_grad_(),
    )


SPECS = {
    "plain": {},
    "dual_clip": {"dualClip": 1.5},
    "tis_off": {"tis": {"enabled": False}},
    "k1": {"kl": {"coefficient": 0.2, "estimator": "k1"}},
    "k2": {"kl": {"coefficient": 0.2, "estimator": "k2"}},
    "k3": {"kl": {"coefficient": 0.2, "estimator": "k3"}},
    "narrow": {"clipLow": 0.05, "clipHigh": 0.1},
    "anchored": {"anchor": "Rollout"},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("values", SPECS.values(), ids=SPECS.keys())
def test_loss_and_metrics_equal_the_reference(values: dict[str, Any], mode: LossAggregation) -> None:
    for seed in range(3):
        spec = make_spec(aggregation=mode, **values)
        sequences = make_sequences(seed)
        expected_loss, expected_metrics = reference.loss_and_metrics(sequences, spec, CONSTANT_LENGTH)
        for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-5)):
            loss, metrics = policy_gradient_loss(make_inputs(sequences, spec, dtype), spec)
            assert loss.item() == pytest.approx(expected_loss, rel=tolerance, abs=tolerance)
            reported = finish_metrics({name: value.item() for name, value in metrics.items()})
            assert reported == pytest.approx(expected_metrics, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("values", SPECS.values(), ids=SPECS.keys())
def test_gradients_equal_finite_differences_of_the_reference(values: dict[str, Any], mode: LossAggregation) -> None:
    spec = make_spec(aggregation=mode, **values)
    sequences = make_sequences(11)
    inputs = make_inputs(sequences, spec, torch.float64)
    loss, _ = policy_gradient_loss(inputs, spec)
    assert inputs.entropy is not None
    grads = torch.autograd.grad(loss, (inputs.log_probs, inputs.entropy))
    step = 1e-6
    for row, sequence in enumerate(sequences):
        for column, token in enumerate(sequence):
            for field, grad in zip(("new", "entropy"), grads, strict=True):
                values_around = []
                for sign in (1, -1):
                    moved = replace(token, **{field: getattr(token, field) + sign * step})
                    changed = [list(s) for s in sequences]
                    changed[row][column] = moved
                    values_around.append(reference.loss_and_metrics(changed, spec, CONSTANT_LENGTH)[0])
                numeric = (values_around[0] - values_around[1]) / (2 * step)
                assert grad[row, column].item() == pytest.approx(numeric, rel=1e-5, abs=1e-7)
    assert (grads[0][~inputs.mask] == 0).all()
    assert (grads[1][~inputs.mask] == 0).all()


@pytest.mark.parametrize("mode", MODES)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.data())
@settings(max_examples=20)
def test_any_split_into_micro_batches_adds_up(mode: LossAggregation, lengths: list[int], data: st.DataObject) -> None:
    spec = make_spec(aggregation=mode)
    sequences = make_sequences(5, tuple(lengths))
    whole_loss, whole_metrics = policy_gradient_loss(make_inputs(sequences, spec, torch.float64), spec)
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths) - 1))))
    totals = {"num_tokens": sum(lengths), "num_sequences": len(lengths)}
    parts = []
    for begin, end in zip([0, *cuts], [*cuts, len(lengths)], strict=True):
        chosen = [sequences[i] for i in order[begin:end]]
        parts.append(policy_gradient_loss(make_inputs(chosen, spec, torch.float64, **totals), spec))
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole_loss.item(), rel=1e-6)
    for name, value in whole_metrics.items():
        values = [metrics[name].item() for _, metrics in parts]
        combined = max(values) if name in MAX_METRICS else sum(values)
        assert combined == pytest.approx(value.item(), rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("mode", MODES)
def test_packed_tokens_give_the_padded_result(mode: LossAggregation) -> None:
    spec = make_spec(aggregation=mode)
    padded = make_inputs(make_sequences(3), spec, torch.float64)
    mask = padded.mask
    columns = {
        name: getattr(padded, name)[mask]
        for name in ("log_probs", "weights", "old_log_probs", "rollout_log_probs", "reference_log_probs", "entropy")
    }
    advantages = padded.advantages.unsqueeze(1).expand_as(mask)[mask]
    packed = LossInputs(advantages=advantages, mask=torch.ones_like(advantages, dtype=torch.bool), **columns)
    expected, expected_metrics = policy_gradient_loss(padded, spec)
    result, metrics = policy_gradient_loss(packed, spec)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(metrics, expected_metrics)


@pytest.mark.parametrize("mode", MODES)
def test_the_weighted_sum_is_the_aggregate(mode: LossAggregation) -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    values = torch.tensor([[1.0, 3.0, 5.0], [10.0, 7.0, 0.0]])
    weights = token_weights(mask, mode, num_tokens=3, num_sequences=2, constant_length=CONSTANT_LENGTH)
    result = (values * weights).sum()
    expected = {
        LossAggregation.TOKEN_MEAN: 14 / 3,
        LossAggregation.SEQUENCE_MEAN: (2 + 10) / 2,
        LossAggregation.CONSTANT_LENGTH: (4 / 7 + 10 / 7) / 2,
    }
    assert result.item() == pytest.approx(expected[mode])


def test_one_update_uses_its_own_log_probs_as_the_old_ones() -> None:
    spec = make_spec()
    inputs = make_inputs(make_sequences(4), spec, torch.float64)
    loss, metrics = policy_gradient_loss(replace(inputs, old_log_probs=None), spec)
    same, same_metrics = policy_gradient_loss(replace(inputs, old_log_probs=inputs.log_probs.detach()), spec)
    torch.testing.assert_close(loss, same)
    torch.testing.assert_close(metrics, same_metrics)
    assert metrics["ppo_kl"].item() == 0
    assert metrics["pg_clipfrac"].item() == 0
    # The gradient is the plain policy gradient: -w A tis / N.
    (grad,) = torch.autograd.grad(metrics_free_pg(inputs, spec), inputs.log_probs)
    tis, _ = importance_weights(inputs.log_probs.detach(), inputs.rollout_log_probs, spec.tis, Sequences(inputs.mask))
    expected = torch.where(inputs.mask, -inputs.advantages.unsqueeze(1) * tis * inputs.weights, 0.0)
    torch.testing.assert_close(grad, expected)


def metrics_free_pg(inputs: LossInputs, spec: AlgorithmSpec) -> torch.Tensor:
    bare = spec.model_copy(update={"entropy_coefficient": 0.0, "kl": spec.kl.model_copy(update={"coefficient": 0.0})})
    return policy_gradient_loss(replace(inputs, old_log_probs=None), bare)[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["log_probs", "old_log_probs", "rollout_log_probs", "reference_log_probs", "entropy"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_value_that_is_not_finite_reaches_the_loss(field: str, bad: float, sign: float) -> None:
    spec = make_spec()
    inputs = make_inputs(make_sequences(8), spec, torch.float32)
    values = getattr(inputs, field).detach().clone()
    values[2, 3] = bad
    values.requires_grad_(field in ("log_probs", "entropy"))
    inputs = replace(inputs, advantages=sign * inputs.advantages.abs(), **{field: values})
    loss, _ = policy_gradient_loss(inputs, spec)
    assert not loss.isfinite()


@pytest.mark.parametrize("difference", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_clip_does_not_hide_a_ratio_that_is_not_finite(difference: float, sign: float) -> None:
    loss, _ = clipped_policy_loss(torch.tensor([difference, 0.1]), torch.full((2,), sign), 0.2, 0.28, 3.0)
    assert loss[0].isnan()
    assert loss[1].isfinite()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("distance", [100.0, -100.0])
def test_far_but_finite_values_keep_loss_and_gradient_finite(distance: float, sign: float) -> None:
    spec = make_spec()
    inputs = make_inputs(make_sequences(8), spec, torch.float32)
    for field in ("old_log_probs", "rollout_log_probs", "reference_log_probs"):
        values = getattr(inputs, field).clone()
        values[2, 3] += distance
        changed = replace(inputs, advantages=sign * inputs.advantages.abs(), **{field: values})
        loss, _ = policy_gradient_loss(changed, spec)
        (grad,) = torch.autograd.grad(loss, inputs.log_probs)
        assert loss.isfinite(), field
        assert grad.isfinite().all(), field


@given(
    st.floats(-3, 3),
    st.floats(-5, 5),
    st.floats(0, 1),
    st.floats(0.01, 3),
    st.one_of(st.none(), st.floats(1.01, 10)),
)
@settings(max_examples=300)
def test_clip_bounds(log_ratio: float, advantage: float, low: float, high: float, dual: float | None) -> None:
    loss, clipped = clipped_policy_loss(
        torch.tensor(log_ratio, dtype=torch.float64), torch.tensor(advantage, dtype=torch.float64), low, high, dual
    )
    ratio = math.exp(log_ratio)
    slack = 1e-9 * (1 + abs(advantage) * math.exp(3))
    # The objective never promises more than the clipped ratio does ...
    assert -loss.item() <= min(max(ratio, 1 - low), 1 + high) * advantage + slack or dual is not None
    # ... and, with the dual clip, never punishes beyond c.
    if dual is not None and advantage < 0:
        assert loss.item() <= -dual * advantage + slack
    if 1 - low < ratio < 1 + high:
        assert not clipped
        expected = -ratio * advantage
        assert loss.item() == pytest.approx(
            expected if dual is None or advantage >= 0 else min(expected, -dual * advantage)
        )
    if clipped:
        assert (ratio > 1 + high and advantage > 0) or (ratio < 1 - low and advantage < 0)


@given(st.floats(-30, 30), st.floats(-30, 30))
@settings(max_examples=200)
def test_kl_estimators(policy: float, base: float) -> None:
    p, q = torch.tensor(policy, dtype=torch.float64), torch.tensor(base, dtype=torch.float64)
    k1, k2, k3, low_var = (kl_estimate(p, q, KlEstimator(name)).item() for name in ("k1", "k2", "k3", "low_var"))
    d = policy - base
    assert k1 == pytest.approx(d, abs=1e-12)
    assert k2 == pytest.approx(d * d / 2, abs=1e-12)
    assert k3 == pytest.approx(math.expm1(-d) + d, rel=1e-9, abs=1e-9)
    assert k3 >= -1e-9
    assert -10 <= low_var <= 10
    assert low_var == pytest.approx(min(k3, 10.0), rel=1e-9, abs=1e-9)


def test_k1_and_k3_are_unbiased() -> None:
    """Their exact expectation under the policy is the divergence, on a random categorical distribution."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.log_softmax(torch.randn(50, generator=generator, dtype=torch.float64), 0) for _ in range(2))
    divergence = (p.exp() * (p - q)).sum().item()
    for name in ("k1", "k3"):
        assert (p.exp() * kl_estimate(p, q, KlEstimator(name))).sum().item() == pytest.approx(divergence)


@given(st.floats(-50, 50), st.floats(0, 1), st.floats(1, 5))
@settings(max_examples=100)
def test_importance_weights_stay_in_their_bounds(difference: float, low: float, high: float) -> None:
    old = torch.tensor([difference], dtype=torch.float64, requires_grad=True)
    spec = TisSpec(low=low, high=high)
    weights, ratio = importance_weights(old, torch.zeros(1, dtype=torch.float64), spec, Sequences(old > -math.inf))
    assert low <= weights.item() <= high
    assert ratio.item() == pytest.approx(math.exp(difference))
    assert not weights.requires_grad


def test_missing_inputs_are_named() -> None:
    spec = make_spec()
    inputs = make_inputs(make_sequences(1), spec, torch.float32)
    with pytest.raises(ValueError, match=r"algorithm\.kl\.coefficient"):
        policy_gradient_loss(replace(inputs, reference_log_probs=None), spec)
    with pytest.raises(ValueError, match=r"algorithm\.tis\.enabled"):
        policy_gradient_loss(replace(inputs, rollout_log_probs=None), spec)
    with pytest.raises(ValueError, match=r"algorithm\.anchor: Rollout"):
        policy_gradient_loss(
            replace(inputs, rollout_log_probs=None), make_spec(anchor="Rollout", tis={"enabled": False})
        )
    assert inputs.entropy is not None
    for entropy in (None, inputs.entropy.detach()):
        with pytest.raises(ValueError, match=r"algorithm\.entropyCoefficient"):
            policy_gradient_loss(replace(inputs, entropy=entropy), spec)
    with pytest.raises(ValueError, match=r"algorithm\.tis\.low: 2.* above"):
        policy_gradient_loss(inputs, make_spec(tis={"low": 2.0, "high": 1.0}))


def test_monitored_terms_do_not_move_the_loss() -> None:
    spec = make_spec(entropyCoefficient=0.0, kl={"coefficient": 0.0})
    inputs = make_inputs(make_sequences(2), spec, torch.float64)
    loss, metrics = policy_gradient_loss(inputs, spec)
    assert {"entropy_loss", "kl_loss"} <= metrics.keys()
    torch.testing.assert_close(loss, metrics["pg_loss"])
    assert not any(value.requires_grad for value in metrics.values())
