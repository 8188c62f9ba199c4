"""The losses once more, token by token in Python floats, from the papers' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rljob_api.spec import AlgorithmSpec, KlEstimator, LossAggregation
from rljob_api.spec.algorithm import RatioAnchor


@dataclass
class Token:
    new: float
    old: float
    rollout: float
    reference: float
    entropy: float
    advantage: float


def start(token: Token, spec: AlgorithmSpec) -> float:
    return token.rollout if spec.anchor is RatioAnchor.ROLLOUT else token.old


def ppo_term(token: Token, spec: AlgorithmSpec) -> tuple[float, bool]:
    """Minus min(r A, clip(r) A), with the dual clip's max(., c A) for negative A; and whether the clip decided."""
    ratio = math.exp(token.new - start(token, spec))
    clipped = min(max(ratio, 1 - spec.clip_low), 1 + spec.clip_high)
    objective = min(ratio * token.advantage, clipped * token.advantage)
    by_clip = clipped * token.advantage < ratio * token.advantage
    if spec.dual_clip is not None and token.advantage < 0:
        objective = max(objective, spec.dual_clip * token.advantage)
    return -objective, by_clip


def kl_term(token: Token, estimator: KlEstimator) -> float:
    ratio = math.exp(token.reference - token.new)
    log_ratio = token.reference - token.new
    if estimator is KlEstimator.K1:
        return -log_ratio
    if estimator is KlEstimator.K2:
        return 0.5 * log_ratio * log_ratio
    k3 = (ratio - 1) - log_ratio
    return min(max(k3, -10.0), 10.0) if estimator is KlEstimator.LOW_VAR else k3


def tis_weight(token: Token, spec: AlgorithmSpec) -> tuple[float, float]:
    ratio = math.exp(token.old - token.rollout)
    return (min(max(ratio, spec.tis.low), spec.tis.high) if corrected(spec) else 1.0), ratio


def corrected(spec: AlgorithmSpec) -> bool:
    return spec.tis.enabled and spec.anchor is not RatioAnchor.ROLLOUT


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def aggregate(sequences: list[list[float]], mode: LossAggregation, constant_length: int) -> float:
    if mode is LossAggregation.TOKEN_MEAN:
        return mean([value for sequence in sequences for value in sequence])
    if mode is LossAggregation.SEQUENCE_MEAN:
        return mean([mean(sequence) for sequence in sequences])
    return mean([math.fsum(sequence) / constant_length for sequence in sequences])


def loss_and_metrics(
    sequences: list[list[Token]], spec: AlgorithmSpec, constant_length: int
) -> tuple[float, dict[str, float]]:
    def aggregated(term: Callable[[Token], float]) -> float:
        return aggregate(
            [[term(token) for token in sequence] for sequence in sequences], spec.aggregation, constant_length
        )

    tokens = [token for sequence in sequences for token in sequence]
    pg_loss = aggregated(lambda token: tis_weight(token, spec)[0] * ppo_term(token, spec)[0])
    entropy = aggregated(lambda token: token.entropy)
    kl = aggregated(lambda token: kl_term(token, spec.kl.estimator))
    loss = pg_loss - spec.entropy_coefficient * entropy + spec.kl.coefficient * kl
    differences = [token.old - token.rollout for token in tokens]
    metrics = {
        "train/loss": loss,
        "train/pg_loss": pg_loss,
        "train/entropy_loss": entropy,
        "train/kl_loss": kl,
        "train/ppo_kl": mean([start(token, spec) - token.new for token in tokens]),
        "train/pg_clipfrac": mean([float(ppo_term(token, spec)[1]) for token in tokens]),
        "train/train_rollout_logprob_abs_diff": mean([abs(d) for d in differences]),
        "train/train_rollout_logprob_abs_diff_max": max(abs(d) for d in differences),
        "train/mismatch_kl": mean([math.exp(d) - 1 - d for d in differences]),
    }
    if corrected(spec):
        weights = [tis_weight(token, spec) for token in tokens]
        metrics["train/tis"] = mean([ratio for _, ratio in weights])
        metrics["train/tis_clipfrac"] = mean([float(weight != ratio) for weight, ratio in weights])
    return loss, metrics
