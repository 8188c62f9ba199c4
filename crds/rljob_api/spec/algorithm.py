"""`spec.algorithm`: advantages, loss, KL and mismatch correction."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from rljob_api.base import ApiModel, Fraction, NonNegativeFloat, PositiveFloat


class KlEstimator(StrEnum):
    """Estimators of the KL divergence."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    LOW_VAR = "low_var"


class LossAggregation(StrEnum):
    """How token losses become one number."""

    TOKEN_MEAN = "TokenMean"
    SEQUENCE_MEAN = "SequenceMean"
    CONSTANT_LENGTH = "ConstantLength"


class KlSpec(ApiModel):
    """Distance to the reference policy (the starting checkpoint)."""

    coefficient: NonNegativeFloat = 0.0
    """Weight of the KL term in the loss; 0 leaves it out (DAPO, arXiv 2503.14476)."""
    estimator: KlEstimator = KlEstimator.LOW_VAR
    """`k1`, `k2`, `k3` of Schulman's note; `low_var` is k3 clamped to [-10, 10] (slime's default form)."""
    monitor: bool = False
    """Compute and report the KL even where the coefficient is 0 (costs a forward pass)."""


class TisSpec(ApiModel):
    """Truncated importance sampling between the engine's and the trainer's probabilities."""

    enabled: bool = True
    """Correct the loss by the ratio of trainer to engine probability."""
    low: NonNegativeFloat = 0.0
    """Lower bound of the ratio (slime: 0)."""
    high: PositiveFloat = 2.0
    """Upper bound of the ratio (slime and verl: 2.0)."""


class AlgorithmSpec(ApiModel):
    """The policy-gradient algorithm."""

    name: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce_pp", "rloo", "ppo"] = "grpo"
    """Registered algorithm; this version builds `grpo`."""
    clip_low: Fraction = 0.2
    """Ratio is clipped below at 1 - clipLow (PPO, arXiv 1707.06347)."""
    clip_high: PositiveFloat = 0.28
    """Ratio is clipped above at 1 + clipHigh (clip-higher of DAPO, arXiv 2503.14476)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Dual-clip bound c for negative advantages (arXiv 1912.09729); null switches it off (slime's default)."""
    normalize_by_std: bool = True
    """Divide group advantages by the unbiased (n-1) standard deviation plus 1e-6 (GRPO, arXiv 2402.03300); false: Dr.
    GRPO."""
    aggregation: LossAggregation = LossAggregation.TOKEN_MEAN
    """How token losses become one number: `TokenMean` (DAPO), `SequenceMean` (GRPO), `ConstantLength` (Dr. GRPO)."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    kl: KlSpec = KlSpec()
    """Distance to the reference policy."""
    tis: TisSpec = TisSpec()
    """Train-inference mismatch correction."""
