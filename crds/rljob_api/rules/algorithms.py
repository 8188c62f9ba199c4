"""Requirements of the algorithms on the rest of a job, and what changes nothing with them."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pydantic.alias_generators import to_camel

from rljob_api.algorithms import ALGORITHMS, AlgorithmFacts
from rljob_api.derived import max_staleness
from rljob_api.rules.core import Rule, cel_list
from rljob_api.spec import AlgorithmSpec, RLJobSpec


def algorithm_rules(algorithm: AlgorithmFacts) -> Iterator[Rule]:
    """Requirements of one algorithm on the rest of a job."""
    name = algorithm.name
    another = f"has(self.algorithm) && self.algorithm.name != '{name}'"
    if name != AlgorithmSpec().name:
        another = f"!has(self.algorithm) || self.algorithm.name != '{name}'"
    if algorithm.requires_filter:
        yield Rule(
            on=RLJobSpec,
            field="rollout.oversampling",
            wrong=f"algorithm {name} samples groups without a signal away",
            allowed="oversampling: {filter: ZeroVariance}, or algorithm grpo, whose loss is the same",
            check=lambda s: (
                s.algorithm.name != name
                or (s.rollout.oversampling is not None and s.rollout.oversampling.filter is not None)
            ),
            cel=f"({another}) || (has(self.rollout.oversampling) && has(self.rollout.oversampling.filter))",
        )
    if algorithm.requires_on_policy:
        yield Rule(
            on=RLJobSpec,
            field="rollout.partial",
            wrong=f"algorithm {name} learns from samples of the policy that it trains alone",
            allowed="leave it out, or another algorithm",
            check=lambda s: s.algorithm.name != name or s.rollout.partial is None,
            cel=f"({another}) || !has(self.rollout.partial)",
        )
        yield Rule(
            on=RLJobSpec,
            field="rollout.staleness.max",
            wrong=f"algorithm {name} learns from samples of the policy that it trains alone",
            allowed="0 with mode Disaggregated or Async, or another algorithm",
            check=lambda s: s.algorithm.name != name or s.rollout.partial is not None or max_staleness(s) == 0,
            cel=f"({another}) || has(self.rollout.partial) || self.mode == 'Colocated'"
            " || (has(self.rollout.staleness) && self.rollout.staleness.max == 0)",
        )
        yield Rule(
            on=RLJobSpec,
            field="training.globalBatchSize",
            wrong="the second update of a step would learn from samples of the policy before the first",
            allowed=f"rollout.promptsPerStep x rollout.samplesPerPrompt, or left out, with algorithm {name}",
            check=lambda s: (
                s.algorithm.name != name
                or s.training.global_batch_size in (None, s.rollout.prompts_per_step * s.rollout.samples_per_prompt)
            ),
            cel=f"({another}) || !has(self.training) || !has(self.training.globalBatchSize)"
            " || self.training.globalBatchSize == self.rollout.promptsPerStep * self.rollout.samplesPerPrompt",
        )


def group_size_rules() -> Iterator[Rule]:
    """One rule for all algorithms that compare so many samples of a prompt at least."""
    sizes: dict[int, list[str]] = {}
    for name, facts in ALGORITHMS.items():
        sizes.setdefault(facts.min_group_size, []).append(name)
    for least, names in sizes.items():
        if least > 1:
            yield group_size_rule(least, names)


def group_size_rule(least: int, names: list[str]) -> Rule:
    """The least `rollout.samplesPerPrompt` of these algorithms."""
    absent = "has(self.algorithm) &&" if AlgorithmSpec().name in names else "!has(self.algorithm) ||"
    return Rule(
        on=RLJobSpec,
        field="rollout.samplesPerPrompt",
        wrong="the advantages of a group of one are all zero",
        allowed=f"{least} or more with algorithm {', '.join(names)}",
        check=lambda s: s.algorithm.name not in names or s.rollout.samples_per_prompt >= least,
        cel=f"({absent} !(self.algorithm.name in {cel_list(names)})) || self.rollout.samplesPerPrompt >= {least}",
    )


def without_effect_rules() -> Iterator[Rule]:
    """One rule for all algorithms that a field changes nothing with, where its value there is the same."""
    fields: dict[tuple[str, float | bool | None], list[str]] = {}
    for name, facts in ALGORITHMS.items():
        for attribute in facts.without_effect:
            fields.setdefault((attribute, getattr(facts, attribute, None)), []).append(name)
    for (attribute, own), names in fields.items():
        yield _without_effect(attribute, own, names)


def _without_effect(attribute: str, own: float | bool | None, names: list[str]) -> Rule:
    field, others = to_camel(attribute), [name for name in ALGORITHMS if name not in names]
    given = f"has(self.{field})" + ("" if own is None else f" && self.{field} != {json.dumps(own)}")
    # The shorter list.
    among = f"!(self.name in {cel_list(names)})" if len(names) < len(others) else f"self.name in {cel_list(others)}"
    return Rule(
        on=AlgorithmSpec,
        field=field,
        wrong="changes nothing with this algorithm",
        allowed="leave it out",
        check=lambda a: a.name not in names or getattr(a, attribute) == own,
        cel=f"{among} || !({given})",
    )
