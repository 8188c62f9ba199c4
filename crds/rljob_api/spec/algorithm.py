"""`spec.algorithm`: advantages, loss, KL and mismatch correction."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from rljob_api.algorithms import ALGORITHMS, DEFAULT
from rljob_api.base import ApiModel, Fraction, NonNegativeFloat, PositiveFloat, Text, TokenCount


class KlEstimator(StrEnum):
    """Estimators of the KL divergence."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    LOW_VAR = "low_var"


class LossAggregation(StrEnum):
    """Aggregation of token losses to one number."""

    TOKEN_MEAN = "TokenMean"
    SEQUENCE_MEAN = "SequenceMean"
    CONSTANT_LENGTH = "ConstantLength"


class TisLevel(StrEnum):
    """Level of one importance ratio."""

    TOKEN = "Token"
    SEQUENCE = "Sequence"
    GEOMETRIC_MEAN = "GeometricMean"


class TisOutside(StrEnum):
    """Treatment of importance ratios outside their bounds."""

    TRUNCATE = "Truncate"
    MASK = "Mask"


class RatioAnchor(StrEnum):
    """Start of the ratio of the policy loss."""

    TRAINER = "Trainer"
    ROLLOUT = "Rollout"


class KlSpec(ApiModel):
    """Distance to the reference policy (the starting checkpoint)."""

    coefficient: NonNegativeFloat = 0.0
    """Weight of the KL term in the loss; 0 leaves it out (DAPO, arXiv 2503.14476)."""
    estimator: KlEstimator = KlEstimator.LOW_VAR
    """`k1`, `k2`, `k3` of Schulman's note; `low_var` is k3 clamped to [-10, 10] (`low_var_kl` of slime and verl)."""
    unbiased: bool = False
    """Multiply the estimate by the ratio of new to old probability, so that value and gradient stay those of the policy
    being trained when a step has several updates (DeepSeek-V3.2, arXiv 2512.02556)."""
    monitor: bool = False
    """Compute and report the KL even where the coefficient is 0 (costs a forward pass)."""


class TisSpec(ApiModel):
    """Importance sampling between the engine's and the trainer's probabilities, truncated or masked."""

    enabled: bool = True
    """Correct the loss by the ratio of trainer to engine probability."""
    level: TisLevel = TisLevel.TOKEN
    """Level of the ratio: each `Token`, the whole response (`Sequence`: the product over its tokens), or its tokens
    on average (`GeometricMean`)."""
    outside: TisOutside = TisOutside.TRUNCATE
    """Ratios outside the bounds are brought to the bound (`Truncate`), or the tokens leave the loss (`Mask`: IcePop at
    level `Token`, masked sequence importance sampling at level `Sequence`)."""
    low: NonNegativeFloat = 0.0
    """Lower bound of the ratio (slime: 0)."""
    high: PositiveFloat = 2.0
    """Upper bound of the ratio (slime and verl: 2.0)."""


class RewardScope(StrEnum):
    """Over which rewards a mean or deviation is taken."""

    GROUP = "Group"
    BATCH = "Batch"


class RewardShapingSpec(ApiModel):
    """Shaping of rewards before they become advantages (source: ROLL's reward normalisation and clip)."""

    center: RewardScope | None = None
    """Subtract the mean of the prompt's samples (`Group`) or of the step's (`Batch`); null: nothing."""
    scale: RewardScope | None = None
    """Divide by the unbiased standard deviation plus 1e-6 of the prompt's samples (`Group`) or of the step's (`Batch`);
    null: nothing."""
    clip: PositiveFloat | None = None
    """Then clamp to [-clip, clip]; null: no bound."""


class SapoSpec(ApiModel):
    """The gate of algorithm `sapo`."""

    tau_positive: PositiveFloat = 1.0
    """Temperature of tokens with a positive advantage (arXiv 2511.20347: 1.0)."""
    tau_negative: PositiveFloat = 1.05
    """Temperature of the others: a larger one forgets off-policy tokens sooner (arXiv 2511.20347: 1.05)."""


class GaeSpec(ApiModel):
    """Generalized advantage estimation (arXiv 1506.02438) of algorithm `ppo`."""

    gamma: Fraction = 1.0
    """Discount by token."""
    lam: Annotated[Fraction, Field(alias="lambda")] = 1.0
    """1: what followed counts; below 1, the critic's word for it counts too."""


class Divergence(StrEnum):
    """Distances of the policy from its teacher at a token."""

    SAMPLED = "Sampled"
    TOP_K = "TopK"


class TeacherSpec(ApiModel):
    """The model that a policy is brought towards."""

    path: Text
    """Checkpoint folder of a model of the policy's family, of any size, or an id on the hub of `spec.model`. Its
    tokenizer must have the policy's ids."""


class DistillSpec(ApiModel):
    """On-policy distillation (arXiv 2306.13649): reverse KL from a teacher on the policy's own samples."""

    teacher: TeacherSpec
    """Kept in host memory by the trainers, and on their devices while it is computed with."""
    divergence: Divergence = Divergence.SAMPLED
    """`Sampled`: the sampled tokens' log-ratio, as a reward; `TopK`: the KL over the teacher's `topK` likeliest tokens,
    all others being one."""
    top_k: TokenCount = 64
    """Tokens that `TopK` tells apart, at most the vocabulary's: more cost memory."""
    coefficient: PositiveFloat = 1.0
    """Weight of the KL."""
    reward_weight: NonNegativeFloat = 0.0
    """Weight of GRPO's advantages of the rewards beside it; 0: rewards are reported only."""


class OffPolicyMaskSpec(ApiModel):
    """Responses with a negative advantage that the policy has moved away from leave the loss."""

    delta: NonNegativeFloat = 1e-4
    """Mean over a response's tokens of log p_old - log p above which it leaves (DeepSeek-V3.2, arXiv 2512.02556; slime:
    1e-4)."""


if TYPE_CHECKING:

    class AlgorithmName(StrEnum):
        """Registered algorithms."""

else:
    AlgorithmName = StrEnum("AlgorithmName", {name.upper(): name for name in ALGORITHMS}, module=__name__)
    AlgorithmName.__doc__ = "Registered algorithms."


def _own(field: str) -> Any:
    """The algorithm's own value of a field that is left out."""
    return Field(default_factory=lambda given: getattr(ALGORITHMS[given.get("name", DEFAULT)], field))


class AlgorithmSpec(ApiModel):
    """The policy-gradient algorithm. Fields without a default here have the algorithm's own: docs/algorithms.md."""

    name: AlgorithmName = AlgorithmName(DEFAULT)
    """Registered algorithm."""
    clip_low: Fraction = _own("clip_low")
    """Ratio is clipped below at 1 - clipLow (PPO, arXiv 1707.06347)."""
    clip_high: PositiveFloat = _own("clip_high")
    """Ratio is clipped above at 1 + clipHigh (clip-higher of DAPO, arXiv 2503.14476)."""
    dual_clip: Annotated[float, Field(gt=1, le=1e9)] | None = None
    """Dual-clip bound c for negative advantages (arXiv 1912.09729); null switches it off (slime's default)."""
    normalize_by_std: bool = _own("normalize_by_std")
    """Divide group advantages by the unbiased (n-1) standard deviation plus 1e-6 (GRPO, arXiv 2402.03300); false: Dr.
    GRPO."""
    whiten_advantages: bool = _own("whiten_advantages")
    """Subtract the mean of the advantages over the step's response tokens and divide by their standard deviation
    (ROLL's `whiten_advantages`; part of REINFORCE++, arXiv 2501.03262)."""
    advantage_clip: PositiveFloat | None = None
    """Then clamp advantages to [-advantageClip, advantageClip] (ROLL's `advantage_clip`); null: no bound."""
    rewards: RewardShapingSpec = RewardShapingSpec()
    """Normalisation and bound of rewards, before they become advantages."""
    aggregation: LossAggregation = _own("aggregation")
    """Aggregation of token losses to one number: `TokenMean` (DAPO), `SequenceMean` (GRPO), `ConstantLength` (Dr.
    GRPO)."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    kl: KlSpec = KlSpec()
    """Distance to the reference policy."""
    anchor: RatioAnchor | None = None
    """Log-probabilities that the ratio of the policy loss starts from: `Trainer`, the trainer's before the step's first
    update, and `tis` corrects for what lies between them and the engine's; `Rollout`, those with which the engine
    sampled the token, so that the clip bounds the way from there, and `tis` is left out. null: `Rollout` with mode
    Async and a rollout.staleness.max of 2 or more, else `Trainer`."""
    tis: TisSpec = TisSpec()
    """Train-inference mismatch correction."""
    off_policy_mask: OffPolicyMaskSpec | None = None
    """Leave responses with a negative advantage out of the loss where the policy has moved away from them; null: keep
    all."""
    sapo: SapoSpec | None = None
    """Settings of algorithm `sapo`; null: its defaults."""
    gae: GaeSpec | None = None
    """Advantages of algorithm `ppo`; null: its defaults."""
    distill: DistillSpec | None = None
    """The teacher of algorithm `distill`, which needs one."""
