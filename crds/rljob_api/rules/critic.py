"""Rules about the critic."""

from __future__ import annotations

from typing import Any

from rljob_api import derived
from rljob_api.algorithms import ALGORITHMS
from rljob_api.rules.core import Rule, cel_list
from rljob_api.spec import AlgorithmSpec, RLJobSpec

_WITH_CRITIC = [name for name, facts in ALGORITHMS.items() if facts.needs_critic]
_NAMES = ", ".join(_WITH_CRITIC)
_HAS_CRITIC = f"(has(self.algorithm) && self.algorithm.name in {cel_list(_WITH_CRITIC)})"
_UPDATES = "(has(self.critic) ? self.critic.updatesPerStep : 4)"
_SAMPLES = "(self.rollout.promptsPerStep * self.rollout.samplesPerPrompt)"


def _parts_fit(spec: Any) -> bool:
    beside = derived.critic(spec)
    return beside is None or derived.samples_per_step(spec) % beside.updates_per_step == 0


CRITIC = (
    Rule(
        on=AlgorithmSpec,
        field="gae",
        wrong="changes nothing with an algorithm that has no critic",
        allowed=f"only with algorithm {_NAMES}",
        check=lambda algorithm: algorithm.gae is None or ALGORITHMS[algorithm.name].needs_critic,
        cel=f"!has(self.gae) || self.name in {cel_list(_WITH_CRITIC)}",
    ),
    Rule(
        on=RLJobSpec,
        field="critic",
        wrong="the algorithm has no critic",
        allowed=f"only with algorithm {_NAMES}",
        check=lambda spec: spec.critic is None or ALGORITHMS[spec.algorithm.name].needs_critic,
        cel=f"!has(self.critic) || {_HAS_CRITIC}",
    ),
    Rule(
        on=RLJobSpec,
        field="critic.updatesPerStep",
        wrong="the step's samples cannot be divided into updates of the critic",
        allowed="a divisor of rollout.promptsPerStep x rollout.samplesPerPrompt (default: 4)",
        check=_parts_fit,
        cel=f"!{_HAS_CRITIC} || {_SAMPLES} % {_UPDATES} == 0",
    ),
    Rule(
        on=RLJobSpec,
        field="critic.warmupSteps",
        wrong="the policy would never be trained",
        allowed="fewer than steps",
        check=lambda spec: spec.critic is None or spec.critic.warmup_steps < spec.steps,
        cel="!has(self.critic) || self.critic.warmupSteps < self.steps",
    ),
)
