"""Each algorithm's own loss, masks and correction against its formula in Python floats, response by response."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import algorithm_reference as reference
import numpy as np
import pytest
import torch
from test_losses import CONSTANT_LENGTH, make_inputs, make_sequences, make_spec

from rljob_api.spec import AlgorithmSpec, KlEstimator, LossAggregation, SapoSpec
from rljob_worker.algorithms import LossInputs, finish_metrics, get_algorithm, policy_gradient_loss, token_weights
from rljob_worker.algorithms.kl import kl_estimate
from rljob_worker.trainer.batches import PackedBatch
from rljob_worker.types import TrainBatch

Response = list[reference.Token]
BARE = {"entropyCoefficient": 0.0, "kl": {"coefficient": 0.0}, "tis": {"enabled": False}}


def gspo(response: Response, spec: AlgorithmSpec) -> list[float]:
    ratio = math.exp(math.fsum(t.new - t.old for t in response) / len(response))
    clipped = min(max(ratio, 1 - spec.clip_low), 1 + spec.clip_high)
    return [-min(ratio * t.advantage, clipped * t.advantage) for t in response]


def cispo(response: Response, spec: AlgorithmSpec) -> list[float]:
    ratios = [math.exp(t.new - t.old) for t in response]
    return [
        -min(max(ratio, 1 - spec.clip_low), 1 + spec.clip_high) * t.advantage * t.new
        for t, ratio in zip(response, ratios)
    ]


def sapo(response: Response, spec: AlgorithmSpec) -> list[float]:
    values = []
    settings = spec.sapo or SapoSpec()
    for t in response:
        tau = settings.tau_positive if t.advantage > 0 else settings.tau_negative
        gate = 4 / tau / (1 + math.exp(-tau * (math.exp(t.new - t.old) - 1)))
        values.append(-gate * t.advantage)
    return values


FORMULAS: dict[str, Callable[[Response, AlgorithmSpec], list[float]]] = {"gspo": gspo, "cispo": cispo, "sapo": sapo}


def loss_of(name: str, inputs: LossInputs, spec: AlgorithmSpec) -> torch.Tensor:
    return policy_gradient_loss(inputs, spec, get_algorithm(name).token_loss)[0]


def expected_loss(name: str, responses: list[Response], spec: AlgorithmSpec) -> float:
    return reference.aggregate(
        [FORMULAS[name](response, spec) for response in responses], spec.aggregation, CONSTANT_LENGTH
    )


@pytest.mark.parametrize("mode", LossAggregation)
@pytest.mark.parametrize("name", FORMULAS)
def test_loss_equals_the_formula(name: str, mode: LossAggregation) -> None:
    for seed in range(5):
        spec = make_spec(**BARE, aggregation=mode, sapo={"tauPositive": 0.7, "tauNegative": 1.6})
        responses = make_sequences(seed)
        for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-5)):
            loss = loss_of(name, make_inputs(responses, spec, dtype), spec)
            assert loss.item() == pytest.approx(expected_loss(name, responses, spec), rel=tolerance, abs=tolerance)


def moved(responses: list[Response], row: int, column: int, step: float) -> list[Response]:
    changed = [list(response) for response in responses]
    token = changed[row][column]
    changed[row][column] = replace(token, new=token.new + step)
    return changed


@pytest.mark.parametrize("mode", LossAggregation)
@pytest.mark.parametrize("name", ["gspo", "sapo"])
def test_gradient_equals_finite_differences_of_the_formula(name: str, mode: LossAggregation) -> None:
    spec = make_spec(**BARE, aggregation=mode)
    responses = make_sequences(11)
    inputs = make_inputs(responses, spec, torch.float64)
    (grad,) = torch.autograd.grad(loss_of(name, inputs, spec), inputs.log_probs)
    step = 1e-6
    for row, response in enumerate(responses):
        for column in range(len(response)):
            around = [expected_loss(name, moved(responses, row, column, sign * step), spec) for sign in (1, -1)]
            assert grad[row, column].item() == pytest.approx((around[0] - around[1]) / (2 * step), rel=1e-5, abs=1e-7)
    assert (grad[~inputs.mask] == 0).all()


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    """Its ratio is a number: the gradient is -w clip(r) A at every token, outside the bounds as well."""
    spec = make_spec(**BARE, clipLow=0.05, clipHigh=0.1)
    inputs = make_inputs(make_sequences(11), spec, torch.float64)
    loss, metrics = policy_gradient_loss(inputs, spec, get_algorithm("cispo").token_loss)
    (grad,) = torch.autograd.grad(loss, inputs.log_probs)
    ratio = (inputs.log_probs.detach() - inputs.old_log_probs).exp().clamp(0.95, 1.1)
    expected = torch.where(inputs.mask, -inputs.weights * ratio * inputs.advantages.unsqueeze(1), 0.0)
    torch.testing.assert_close(grad, expected)
    assert finish_metrics({k: v.item() for k, v in metrics.items()})["train/pg_clipfrac"] > 0.5


@pytest.mark.parametrize("name", FORMULAS)
def test_on_policy_all_have_the_plain_policy_gradient(name: str) -> None:
    spec = make_spec(**BARE)
    inputs = replace(make_inputs(make_sequences(4), spec, torch.float64), old_log_probs=None)
    (grad,) = torch.autograd.grad(loss_of(name, inputs, spec), inputs.log_probs)
    torch.testing.assert_close(grad, torch.where(inputs.mask, -inputs.weights * inputs.advantages.unsqueeze(1), 0.0))


def packed(inputs: LossInputs) -> LossInputs:
    """The same tokens one after the other, with the response that each belongs to."""
    mask = inputs.mask
    names = ("log_probs", "weights", "old_log_probs", "rollout_log_probs", "reference_log_probs", "entropy")
    advantages = inputs.advantages.unsqueeze(1).expand_as(mask)[mask]
    return LossInputs(
        advantages=advantages,
        mask=torch.ones_like(advantages, dtype=torch.bool),
        sequences=mask.nonzero()[:, 0],
        **{name: getattr(inputs, name)[mask] for name in names},
    )


CORRECTIONS: dict[str, dict[str, Any]] = {
    "icepop": {"tis": {"outside": "Mask", "low": 0.7, "high": 1.6}},
    "sequence": {"tis": {"level": "Sequence", "low": 0.1, "high": 3.0}},
    "masked_sequence": {"tis": {"level": "Sequence", "outside": "Mask", "low": 0.5, "high": 3.0}},
    "geometric": {"tis": {"level": "GeometricMean", "outside": "Mask", "low": 0.8, "high": 1.3}},
    "off_policy_mask": {"offPolicyMask": {"delta": 0.05}},
    "unbiased_k3": {"kl": {"coefficient": 0.2, "estimator": "k3", "unbiased": True}},
    "unbiased_low_var": {"kl": {"coefficient": 0.2, "unbiased": True}},
}


@pytest.mark.parametrize("values", CORRECTIONS.values(), ids=CORRECTIONS.keys())
@pytest.mark.parametrize("name", ["grpo", *FORMULAS])
def test_packed_and_split_tokens_give_the_padded_result(name: str, values: dict[str, Any]) -> None:
    spec = make_spec(**values)
    responses = make_sequences(3)
    whole = make_inputs(responses, spec, torch.float64)
    loss, metrics = policy_gradient_loss(whole, spec, get_algorithm(name).token_loss)
    flat_loss, flat_metrics = policy_gradient_loss(packed(whole), spec, get_algorithm(name).token_loss)
    torch.testing.assert_close(flat_loss, loss)
    torch.testing.assert_close(flat_metrics, metrics)
    totals = {"num_tokens": sum(map(len, responses)), "num_sequences": len(responses)}
    parts = [make_inputs([response], spec, torch.float64, **totals) for response in responses]
    assert math.fsum(loss_of(name, part, spec).item() for part in parts) == pytest.approx(loss.item(), rel=1e-6)


def correction(response: Response, spec: AlgorithmSpec) -> list[float]:
    """The factor of each token from its response's ratios."""
    differences = [t.old - t.rollout for t in response]
    total = math.fsum(differences)
    ratios = {
        "Token": [math.exp(d) for d in differences],
        "Sequence": [math.exp(total)] * len(response),
        "GeometricMean": [math.exp(total / len(response))] * len(response),
    }[spec.tis.level.value]
    if spec.tis.outside.value == "Mask":
        return [ratio if spec.tis.low <= ratio <= spec.tis.high else 0.0 for ratio in ratios]
    return [min(max(ratio, spec.tis.low), spec.tis.high) for ratio in ratios]


@pytest.mark.parametrize("case", ["icepop", "sequence", "masked_sequence", "geometric"])
def test_corrections_equal_their_formulas(case: str) -> None:
    touched = 0
    for seed in range(5):
        spec = make_spec(**BARE | CORRECTIONS[case])
        responses = make_sequences(seed)
        loss, metrics = policy_gradient_loss(make_inputs(responses, spec, torch.float64), spec)
        expected = reference.aggregate(
            [
                [factor * reference.ppo_term(t, spec)[0] for factor, t in zip(correction(response, spec), response)]
                for response in responses
            ],
            spec.aggregation,
            CONSTANT_LENGTH,
        )
        assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-6)
        touched += metrics["tis_clipfrac"].item()
    assert touched, "no ratio was outside its bounds: the case shows nothing"


def test_responses_that_the_policy_left_behind_are_masked() -> None:
    masked = 0.0
    for seed in range(5):
        spec = make_spec(**BARE, offPolicyMask={"delta": 0.05})
        responses = make_sequences(seed)

        def kept(response: Response) -> float:
            distance = math.fsum(t.old - t.new for t in response) / len(response)
            return float(response[0].advantage >= 0 or distance <= 0.05)

        terms = [[kept(r) * reference.ppo_term(t, spec)[0] for t in r] for r in responses]
        loss, metrics = policy_gradient_loss(make_inputs(responses, spec, torch.float64), spec)
        expected = reference.aggregate(terms, spec.aggregation, CONSTANT_LENGTH)
        assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-6)
        share = sum(len(r) for r in responses if not kept(r)) / sum(map(len, responses))
        assert metrics["off_policy_masked"].item() / metrics["tokens"].item() == pytest.approx(share)
        masked += share
    assert masked


def test_the_unbiased_kl_and_its_gradient_are_exact_in_expectation() -> None:
    """Over all tokens of a categorical distribution: sampled from the old policy, the divergence is the new one's."""
    generator = torch.Generator().manual_seed(0)
    new, old, base = (torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(3))
    new.requires_grad_()
    log_new, log_old, log_base = new.log_softmax(0), old.log_softmax(0), base.log_softmax(0)
    exact = (log_new.exp() * (log_new - log_base)).sum()
    for estimator in ("k1", "k3"):
        spec = make_spec(kl={"coefficient": 0.1, "estimator": estimator}).kl
        estimate = (log_old.exp() * kl_estimate(log_new, log_base, spec.estimator, log_new - log_old)).sum()
        assert estimate.item() == pytest.approx(exact.item())
        for value in (estimate, exact):
            assert value.requires_grad
        torch.testing.assert_close(
            *(torch.autograd.grad(value, new, retain_graph=True)[0] for value in (estimate, exact))
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", [KlEstimator.K3, KlEstimator.LOW_VAR])
@pytest.mark.parametrize("log_ratio", [0.0, 0.7, -3.0, -19.0, -25.0, 25.0])
@pytest.mark.parametrize("d", [-38.0, -20.0, -18.0, -17.0, -8.0, -0.5, 0.0, 0.5, 17.0, 40.0])
def test_the_gradient_of_the_unbiased_k3_holds_far_from_the_reference(
    d: float, log_ratio: float, estimator: KlEstimator, dtype: torch.dtype
) -> None:
    """exp(-d) - 1 and its inverse cancel out of it: in fp32 nothing of the gradient was left beyond 17 nats."""
    old = -1.5
    log_probs = torch.tensor([old + log_ratio], dtype=dtype, requires_grad=True)
    value = kl_estimate(log_probs, log_probs.detach() - d, estimator, log_probs - old)
    (gradient,) = torch.autograd.grad(value.sum(), log_probs)
    bounded = min(max(log_ratio, -20.0), 20.0)
    exact = math.exp(bounded) * (math.expm1(-d) + d)
    slope = math.exp(bounded) * (d if bounded == log_ratio else -math.expm1(-d))
    if estimator is KlEstimator.LOW_VAR and exact > 10:
        exact, slope = 10.0, 0.0
    precision = 1e-5 if dtype is torch.float32 else 1e-12
    scale = precision * math.exp(bounded)
    assert value.item() == pytest.approx(exact, rel=4 * precision, abs=scale)
    assert gradient.item() == pytest.approx(slope, rel=4 * precision, abs=scale)


def test_the_gates_temperature_has_the_precision_of_the_tokens() -> None:
    spec = make_spec(**BARE, sapo={"tauPositive": 0.1, "tauNegative": 1.05})
    for advantage, seed in ((1.0, 1), (-1.0, 2)):
        responses = [[replace(t, advantage=advantage) for t in response] for response in make_sequences(seed)]
        loss = loss_of("sapo", make_inputs(responses, spec, torch.float64), spec).item()
        assert loss == pytest.approx(expected_loss("sapo", responses, spec), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "extra"),
    [("gspo", {}), ("grpo", {"offPolicyMask": {}}), ("grpo", {"tis": {"level": "Sequence", "outside": "Mask"}})],
)
def test_a_sample_without_trained_tokens_may_stand_anywhere(name: str, extra: dict[str, Any]) -> None:
    """`onLimit: Mask` leaves whole samples out: the loss is the same wherever those stand."""
    losses = []
    for order in ([3, 4, 0, 1, 2], [0, 1, 2, 3, 4], [0, 4, 1, 2, 3], [0, 1, 2, 4, 3]):
        counts, lengths = np.array([0, 0, 0, 1, 2])[order], np.array([7, 6, 3, 4, 5])[order]
        sampled = np.concatenate([np.arange(size) >= size - count for size, count in zip(lengths, counts)])
        values = np.concatenate([-np.arange(1, count + 1) / (count + 1) for count in counts]).astype(np.float32)
        batch = TrainBatch(
            tokens=np.arange(len(sampled)), lengths=lengths, sampled=sampled, rollout_log_probs=values,
            advantages=np.sign(values + 0.55), versions=np.zeros(3, np.int64), experts=None,
        )  # fmt: skip
        rows = PackedBatch(batch).micro_batch(np.arange(5))
        spec = make_spec(**{"entropyCoefficient": 0.0, "kl": {"coefficient": 0.0}}, **{"name": name, **extra})
        inputs = LossInputs(
            log_probs=(rows.rollout_log_probs - 0.1).requires_grad_(),
            old_log_probs=rows.rollout_log_probs + 0.2,
            advantages=rows.advantages,
            mask=torch.ones(3, dtype=torch.bool),
            weights=token_weights(rows.mask, spec.aggregation, num_tokens=3, num_sequences=5, constant_length=8)[
                rows.mask
            ],
            rollout_log_probs=rows.rollout_log_probs,
            sequences=rows.sequences,
        )
        losses.append(loss_of(name, inputs, spec).item())
    assert losses == pytest.approx([losses[0]] * 4)
    assert losses[0] != 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["log_probs", "old_log_probs", "rollout_log_probs"])
@pytest.mark.parametrize("case", ["icepop", "masked_sequence", "geometric"])
@pytest.mark.parametrize("name", FORMULAS)
def test_what_is_not_finite_reaches_the_loss(name: str, case: str, field: str, bad: float) -> None:
    spec = make_spec(**CORRECTIONS[case])
    inputs = make_inputs(make_sequences(8), spec, torch.float32)
    values = getattr(inputs, field).detach().clone()
    values[2, 3] = bad
    inputs = replace(inputs, **{field: values.requires_grad_(field == "log_probs")})
    assert not loss_of(name, inputs, spec).isfinite()


def test_packed_tokens_need_to_know_their_responses() -> None:
    spec = make_spec(**BARE)
    inputs = replace(packed(make_inputs(make_sequences(3), spec, torch.float64)), sequences=None)
    with pytest.raises(ValueError, match="which response each belongs to"):
        loss_of("gspo", inputs, spec)
