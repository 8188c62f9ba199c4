"""Rules about evaluations, and what is measured by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rljob_api.rules.core import Rule, exactly_one
from rljob_api.spec import (
    EvaluationSpec,
    RLJobSpec,
    RolloutSpec,
)
from rljob_api.spec.rollout import MIN_TEMPERATURE


def _evaluation_metric(field: str, block: str, given: str, metric: Callable[[Any], str | None]) -> Rule:
    def check(spec: Any) -> bool:
        name = metric(spec)
        return name is None or not name.startswith("eval/") or spec.evaluation is not None

    return Rule(
        on=RLJobSpec,
        field=f"{field}.metric",
        wrong="there is no evaluation that could measure it",
        allowed="spec.evaluation, or a metric of each step",
        check=check,
        cel=f"!({given}) || !self.{block}.metric.startsWith('eval/') || has(self.evaluation)",
    )


def _sets(evaluation: Any) -> Iterator[tuple[int, list[int]]]:
    """Samples for each prompt and the k of pass@k, of each of the sets."""
    for held_out in evaluation.sets or []:
        yield held_out.samples_per_prompt or evaluation.samples_per_prompt, held_out.pass_at or evaluation.pass_at


_SAMPLES = "(has(e.samplesPerPrompt) ? e.samplesPerPrompt : self.samplesPerPrompt)"

EVALUATION = (
    _evaluation_metric(
        "earlyStop", "earlyStop", "has(self.earlyStop)", lambda s: s.early_stop.metric if s.early_stop else None
    ),
    _evaluation_metric(
        "checkpoint.keepBest",
        "checkpoint.keepBest",
        "has(self.checkpoint) && has(self.checkpoint.keepBest)",
        lambda s: s.checkpoint.keep_best.metric if s.checkpoint.keep_best else None,
    ),
    exactly_one(EvaluationSpec, "data", "sets"),
    Rule(
        on=EvaluationSpec,
        field="passAt",
        wrong="pass@k needs k samples of each prompt",
        allowed="each at most samplesPerPrompt",
        check=lambda e: e.sets is not None or all(k <= e.samples_per_prompt for k in e.pass_at),
        cel="has(self.sets) || self.passAt.all(k, k <= self.samplesPerPrompt)",
    ),
    Rule(
        on=EvaluationSpec,
        field="sets",
        wrong="pass@k needs k samples of each prompt of a set",
        allowed="each of a set's passAt at most its samplesPerPrompt; those of the evaluation hold where it has none",
        check=lambda e: all(k <= samples for samples, pass_at in _sets(e) for k in pass_at),
        cel="!has(self.sets) || self.sets.all(e, (has(e.passAt) ? e.passAt : self.passAt).all(k, k <= "
        + _SAMPLES
        + "))",
    ),
    Rule(
        on=EvaluationSpec,
        field="sets",
        wrong="two sets have the same name",
        allowed="a different name for each set",
        check=lambda e: len({held_out.name for held_out in e.sets or []}) == len(e.sets or []),
        cel="!has(self.sets) || self.sets.all(a, self.sets.exists_one(b, b.name == a.name))",
    ),
    Rule(
        on=EvaluationSpec,
        field="sets",
        wrong="all samples of a set's prompt would be the same: temperature 0 takes the most likely token",
        allowed="samplesPerPrompt 1 with temperature 0, or a temperature above it",
        check=lambda e: e.temperature > 0 or all((s.samples_per_prompt or 1) == 1 for s in e.sets or []),
        cel="!has(self.sets) || self.temperature > 0.0"
        " || self.sets.all(e, !has(e.samplesPerPrompt) || e.samplesPerPrompt == 1)",
    ),
    Rule(
        on=EvaluationSpec,
        field="samplesPerPrompt",
        wrong="all samples of a prompt would be the same: temperature 0 takes the most likely token",
        allowed="1 with temperature 0, or a temperature above it",
        check=lambda e: e.samples_per_prompt == 1 or e.temperature > 0,
        cel="self.samplesPerPrompt == 1 || self.temperature > 0.0",
    ),
    Rule(
        on=RolloutSpec,
        field="temperature",
        wrong="is below the smallest that the engine computes with",
        allowed=f"at least {MIN_TEMPERATURE}",
        check=lambda r: r.temperature >= MIN_TEMPERATURE,
        # As a bound of the schema it would let 0 pass: the API server cuts the fraction off a bound of a whole number.
        cel=f"self.temperature >= {MIN_TEMPERATURE}",
    ),
    Rule(
        on=EvaluationSpec,
        field="temperature",
        wrong="is raised by the engine to the smallest that it computes with",
        allowed=f"0, or at least {MIN_TEMPERATURE}",
        check=lambda e: e.temperature == 0 or e.temperature >= MIN_TEMPERATURE,
        cel=f"self.temperature == 0.0 || self.temperature >= {MIN_TEMPERATURE}",
    ),
)
