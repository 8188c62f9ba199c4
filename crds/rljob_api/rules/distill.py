"""Rules about distillation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rljob_api.algorithms import ALGORITHMS
from rljob_api.rules.core import Rule, cel_list
from rljob_api.rules.findings import Check, Finding
from rljob_api.spec import AlgorithmSpec, DistillSpec, Divergence, RLJobSpec

_WITH_TEACHER = [name for name, facts in ALGORITHMS.items() if facts.needs_teacher]
_NAMES = ", ".join(_WITH_TEACHER)
_ALL_TOKENS = {"topP": ("top_p", 1.0), "topK": ("top_k", 0), "minP": ("min_p", 0.0)}
_DISTILLS = f"(has(self.algorithm) && self.algorithm.name in {cel_list(_WITH_TEACHER)})"


def _distills(spec: Any) -> bool:
    return ALGORITHMS[spec.algorithm.name].needs_teacher


def _of_all_tokens(field: str, attribute: str, whole: float) -> Rule:
    return Rule(
        on=RLJobSpec,
        field=f"rollout.{field}",
        wrong="policy and teacher are compared over the whole vocabulary",
        allowed=f"{whole:g} with algorithm {_NAMES}",
        check=lambda spec: not _distills(spec) or getattr(spec.rollout, attribute) == whole,
        cel=f"!{_DISTILLS} || double(self.rollout.{field}) == {whole:.1f}",
    )


DISTILL = (
    Rule(
        on=AlgorithmSpec,
        field="distill",
        wrong="changes nothing with an algorithm that has no teacher",
        allowed=f"only with algorithm {_NAMES}",
        check=lambda algorithm: algorithm.distill is None or ALGORITHMS[algorithm.name].needs_teacher,
        cel=f"!has(self.distill) || self.name in {cel_list(_WITH_TEACHER)}",
    ),
    Rule(
        on=AlgorithmSpec,
        field="distill",
        wrong=f"algorithm {_NAMES} needs a teacher",
        allowed="distill: {teacher: {path: FOLDER_OR_HUB_ID}}, or another algorithm",
        check=lambda algorithm: algorithm.distill is not None or not ALGORITHMS[algorithm.name].needs_teacher,
        cel=f"has(self.distill) || !(self.name in {cel_list(_WITH_TEACHER)})",
    ),
    Rule(
        on=AlgorithmSpec,
        field="kl.coefficient",
        wrong="would hold the policy at its start, while nothing but its teacher is learned from",
        allowed="0, or a distill.rewardWeight above 0",
        check=lambda algorithm: (
            algorithm.distill is None or algorithm.distill.reward_weight > 0 or algorithm.kl.coefficient == 0
        ),
        cel="!has(self.distill) || self.distill.rewardWeight > 0.0 || !has(self.kl) || self.kl.coefficient == 0.0",
    ),
    Rule(
        on=DistillSpec,
        field="topK",
        wrong="changes nothing where only the sampled token is looked at",
        allowed="64, or divergence: TopK",
        check=lambda distill: distill.divergence == Divergence.TOP_K or distill.top_k == 64,
        cel="self.divergence == 'TopK' || self.topK == 64",
    ),
    Rule(
        on=RLJobSpec,
        field="rollout.samplesPerPrompt",
        wrong="with a distill.rewardWeight above 0 samples of a prompt are compared, and the advantages of a group of "
        "one are all zero",
        allowed="2 or more, or algorithm.distill.rewardWeight: 0",
        check=lambda spec: (
            spec.algorithm.distill is None
            or spec.algorithm.distill.reward_weight == 0
            or spec.rollout.samples_per_prompt > 1
        ),
        cel="!has(self.algorithm) || !has(self.algorithm.distill) || self.algorithm.distill.rewardWeight == 0.0"
        " || self.rollout.samplesPerPrompt > 1",
    ),
    Rule(
        on=RLJobSpec,
        field="rollout.oversampling.filter",
        wrong="leaves groups out by rewards, from which nothing is learned with distill.rewardWeight 0",
        allowed="a distill.rewardWeight above 0, or oversampling without filter",
        check=lambda spec: (
            spec.algorithm.distill is None
            or spec.algorithm.distill.reward_weight > 0
            or spec.rollout.oversampling is None
            or spec.rollout.oversampling.filter is None
        ),
        cel="!has(self.algorithm) || !has(self.algorithm.distill) || self.algorithm.distill.rewardWeight > 0.0"
        " || !has(self.rollout.oversampling) || !has(self.rollout.oversampling.filter)",
    ),
    *(_of_all_tokens(field, *known) for field, known in _ALL_TOKENS.items()),
)


def _shaped(spec: Any) -> Iterator[Finding]:
    """Rewards that are shaped, and not learned from."""
    distill = spec.algorithm.distill
    if distill is None or distill.reward_weight > 0:
        return
    shaping = spec.algorithm.rewards
    for name in ("center", "scale", "clip"):
        if getattr(shaping, name) is not None:
            wrong = "has no effect: nothing is learned from rewards with distill.rewardWeight 0"
            yield Finding(("algorithm", "rewards", name), wrong, "leave it out, or a rewardWeight above 0")


DISTILL_CHECKS: dict[type, tuple[Check, ...]] = {RLJobSpec: (_shaped,)}
