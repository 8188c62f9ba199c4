"""Rules about what is learned: rollout, training, and the schedule of both."""

from __future__ import annotations

from typing import Any

from rljob_api.algorithms import ALGORITHMS
from rljob_api.phases import TIMED_PHASES
from rljob_api.rules.algorithms import algorithm_rules, group_size_rules, without_effect_rules
from rljob_api.rules.core import Rule, cel_list
from rljob_api.rules.evaluation import EVALUATION
from rljob_api.rules.rollout import PARTIAL_AND_TAIL, SPECULATIVE
from rljob_api.rules.trackers import TRACKERS
from rljob_api.spec import (
    OptimizerSpec,
    OversamplingSpec,
    RewardScope,
    RLJobSpec,
    RolloutSpec,
    TimeoutsSpec,
    TisOutside,
    TisSpec,
)


def _scope_rule(field: str) -> Rule:
    """A group or a step of one sample has its own reward as mean, and no deviation."""
    of_group, of_batch = f"'{RewardScope.GROUP}'", f"'{RewardScope.BATCH}'"
    given = f"has(self.algorithm) && has(self.algorithm.rewards) && has(self.algorithm.rewards.{field})"
    scope = f"self.algorithm.rewards.{field}"

    def check(spec: Any) -> bool:
        chosen, samples = getattr(spec.algorithm.rewards, field), spec.rollout.samples_per_prompt
        if chosen == RewardScope.BATCH:
            samples *= spec.rollout.prompts_per_step
        return chosen is None or samples > 1

    return Rule(
        on=RLJobSpec,
        field=f"algorithm.rewards.{field}",
        wrong="the mean and deviation of one sample say nothing: all rewards would be zero or alike",
        allowed="Group with rollout.samplesPerPrompt of 2 or more, Batch with a step of 2 samples or more, or left out",
        check=check,
        cel=f"!({given}) || ({scope} != {of_group} || self.rollout.samplesPerPrompt > 1)"
        f" && ({scope} != {of_batch} || self.rollout.samplesPerPrompt * self.rollout.promptsPerStep > 1)",
    )


_WHITENING = [name for name, algorithm in ALGORITHMS.items() if algorithm.whiten_advantages]
_WHITENED = (
    "self.rollout.promptsPerStep * self.rollout.samplesPerPrompt > 1 || !has(self.algorithm)"
    " || !(has(self.algorithm.whitenAdvantages) ? self.algorithm.whitenAdvantages"
    f" : self.algorithm.name in {cel_list(_WHITENING)})"
)

NOTHING_TO_LEARN = (
    _scope_rule("center"),
    _scope_rule("scale"),
    Rule(
        on=RLJobSpec,
        field="algorithm.whitenAdvantages",
        wrong="whitened, the advantages of a step of one sample are zero",
        allowed="false, or a step of 2 samples or more",
        check=lambda s: (
            not s.algorithm.whiten_advantages or s.rollout.prompts_per_step * s.rollout.samples_per_prompt > 1
        ),
        cel=_WHITENED,
    ),
    Rule(
        on=RolloutSpec,
        field="topK",
        wrong="leaves one token to choose from: its probability is 1 whatever is trained",
        allowed="0 (all), or 2 and more",
        check=lambda r: r.top_k != 1,
        cel="self.topK != 1",
    ),
    Rule(
        on=RolloutSpec,
        field="topP",
        wrong="leaves the most likely token alone: its probability is 1 whatever is trained",
        allowed="at least 0.01",
        check=lambda r: r.top_p >= 0.01,
        cel="self.topP >= 0.01",
    ),
    Rule(
        on=RolloutSpec,
        field="minP",
        wrong="leaves the most likely token alone: its probability is 1 whatever is trained",
        allowed="below 1",
        check=lambda r: r.min_p < 1,
        cel="self.minP < 1.0",
    ),
    Rule(
        on=TisSpec,
        field="low",
        wrong="tokens on which engine and trainer agree (ratio 1) would leave the loss",
        allowed="with outside: Mask, low at most 1 and high at least 1",
        check=lambda t: not t.enabled or t.outside != TisOutside.MASK or t.low <= 1 <= t.high or t.low >= t.high,
        cel=f"!self.enabled || self.outside != '{TisOutside.MASK}' || (self.low <= 1.0 && self.high >= 1.0)"
        " || self.low >= self.high",
    ),
)
"""Settings with which a job runs to its end and has learned nothing."""


LEARNING = (
    *NOTHING_TO_LEARN,
    Rule(
        on=RLJobSpec,
        field="rollout.oversampling.filter",
        wrong="the rewards of one sample are always all equal: no group would pass",
        allowed="rollout.samplesPerPrompt of 2 or more with ZeroVariance",
        check=lambda s: (
            s.rollout.oversampling is None or s.rollout.oversampling.filter is None or s.rollout.samples_per_prompt > 1
        ),
        cel="!has(self.rollout.oversampling) || !has(self.rollout.oversampling.filter)"
        " || self.rollout.samplesPerPrompt > 1",
    ),
    Rule(
        on=OversamplingSpec,
        field="filter",
        wrong="nothing says which groups are left out",
        allowed="filter: ZeroVariance, a function, or both",
        check=lambda o: o.filter is not None or o.function is not None,
        cel="has(self.filter) || has(self.function)",
    ),
    *SPECULATIVE,
    *PARTIAL_AND_TAIL,
    *EVALUATION,
    *TRACKERS,
    *(rule for algorithm in ALGORITHMS.values() for rule in algorithm_rules(algorithm)),
    *group_size_rules(),
    *without_effect_rules(),
    Rule(
        on=TisSpec,
        field="low",
        wrong="leaves no room between the bounds",
        allowed="less than high",
        check=lambda t: t.low < t.high,
        cel="self.low < self.high",
    ),
    Rule(
        on=OptimizerSpec,
        field="minLr",
        wrong="is above the peak learning rate",
        allowed="at most lr",
        check=lambda o: o.min_lr <= o.lr,
        cel="self.minLr <= self.lr",
    ),
    Rule(
        on=OptimizerSpec,
        field="decaySteps",
        wrong="the schedule ends before its warm-up",
        allowed="at least warmupSteps",
        check=lambda o: o.decay_steps is None or o.decay_steps >= o.warmup_steps,
        cel="!has(self.decaySteps) || self.decaySteps >= self.warmupSteps",
    ),
    Rule(
        on=TimeoutsSpec,
        field="phases",
        wrong="names a phase that does not exist",
        allowed=", ".join(TIMED_PHASES),
        check=lambda t: all(name in TIMED_PHASES for name in t.phases),
        cel=f"self.phases.all(name, name in {cel_list(TIMED_PHASES)})",
    ),
)
