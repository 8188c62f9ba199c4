"""Rules about the model, data, rewards, rollout and training."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from pydantic.alias_generators import to_camel

from rljob_api.algorithms import ALGORITHMS, AlgorithmFacts
from rljob_api.base import ApiModel
from rljob_api.derived import max_staleness
from rljob_api.phases import TIMED_PHASES
from rljob_api.rewards import missing_arguments, part_name
from rljob_api.rules.core import Rule, exactly_one
from rljob_api.spec import (
    AlgorithmSpec,
    DataSource,
    DataSpec,
    EvaluationSet,
    EvaluationSpec,
    ModelSpec,
    OptimizerSpec,
    OversamplingSpec,
    RecordsSpec,
    RewardPart,
    RewardScope,
    RewardSpec,
    RLJobSpec,
    RolloutSpec,
    SpeculativeSpec,
    TimeoutsSpec,
    TisOutside,
    TisSpec,
    TrackerSpec,
)
from rljob_api.spec.rollout import MIN_TEMPERATURE, RESERVED_ENGINE_ARGS, RolloutAssignment


def _all_have_reward(spec: Any) -> bool:
    if spec.data.sources:
        return all(source.reward is not None for source in spec.data.sources)
    return spec.data.reward is not None


def _source_names_differ(data: Any) -> bool:
    names = [source.name for source in data.sources if source.name is not None]
    return len(names) == len(set(names))


def _part_names_differ(reward: Any) -> bool:
    names = [part_name(part) for part in reward.parts or []]
    return len(names) == len(set(names))


def _chat_rule(source: type[ApiModel]) -> Rule:
    return Rule(
        on=source,
        field="chat",
        wrong="has no effect without a chat template",
        allowed="only with applyChatTemplate: true",
        check=lambda s: s.chat is None or s.apply_chat_template,
        cel="!has(self.chat) || (has(self.applyChatTemplate) && self.applyChatTemplate)",
    )


def _weights_rules() -> Iterator[Rule]:
    yield Rule(
        on=DataSource,
        field="weights",
        wrong="has no effect beside weight",
        allowed="weights or weight, not both",
        check=lambda s: s.weights is None or s.weight == 1,
        cel="!has(self.weights) || !has(self.weight) || self.weight == 1.0",
    )
    yield Rule(
        on=DataSource,
        field="weights",
        wrong="the steps do not ascend from 0",
        allowed="0 for from of the first, and a later step for each one after it",
        check=lambda s: _ascend_from_zero([one.first_step for one in s.weights or []]),
        # CEL cannot compare neighbours.
        cel=None,
    )
    yield Rule(
        on=DataSource,
        field="weights",
        wrong="nothing is ever drawn from the source",
        allowed="a value above 0 for some step",
        check=lambda s: not s.weights or any(one.value > 0 for one in s.weights),
        cel="!has(self.weights) || self.weights.exists(w, w.value > 0.0)",
    )
    for where, data in ((DataSpec, "the data are one source"), (EvaluationSet, "held-out data are not mixed")):
        yield Rule(
            on=where,
            field="weights",
            wrong=f"has no effect: {data}",
            allowed="only in data.sources",
            check=lambda s: s.weights is None,
            cel="!has(self.weights)",
        )
    yield Rule(
        on=EvaluationSpec,
        field="data.weights",
        wrong="has no effect: held-out data are not mixed",
        allowed="only in data.sources",
        check=lambda e: e.data is None or e.data.weights is None,
        cel="!has(self.data) || !has(self.data.weights)",
    )
    yield Rule(
        on=DataSpec,
        field="sources",
        wrong="from some step on, nothing is drawn from any source",
        allowed="at each step a weight above 0 for one of the sources",
        check=_always_some_weight,
        cel=None,
    )


def _ascend_from_zero(steps: list[int]) -> bool:
    return not steps or (steps[0] == 0 and all(a < b for a, b in itertools.pairwise(steps)))


def _always_some_weight(data: Any) -> bool:
    changes = {max(1, one.first_step) for source in data.sources for one in source.weights or []}
    return not data.sources or all(any(_weight_at(source, step) > 0 for source in data.sources) for step in changes)


def _weight_at(source: Any, step: int) -> float:
    if not source.weights:
        return float(source.weight)
    return next((float(one.value) for one in reversed(source.weights) if one.first_step <= step), 0.0)


def _reward_rules(function: type[ApiModel]) -> Iterator[Rule]:
    yield Rule(
        on=function,
        field="batch",
        wrong="the built-in rewards take single samples",
        allowed="true only with python",
        check=lambda r: not r.batch or r.python is not None,
        cel="!has(self.batch) || !self.batch || has(self.python)",
    )
    yield Rule(
        on=function,
        field="signature",
        wrong="has no effect on a built-in reward",
        allowed="only beside python",
        check=lambda r: r.signature == "RLJob" or r.python is not None,
        cel="!has(self.signature) || self.signature == 'RLJob' || has(self.python)",
    )
    yield Rule(
        on=function,
        field="batch",
        wrong="how many samples a call gets follows from the signature",
        allowed="true only with signature RLJob or Auto",
        check=lambda r: not r.batch or r.signature in ("RLJob", "Auto"),
        cel="!has(self.batch) || !self.batch || !has(self.signature) || self.signature in ['RLJob', 'Auto']",
    )
    yield Rule(
        on=function,
        field="args",
        wrong="the built-in reward needs an argument that is not there",
        allowed="{pattern: REGULAR EXPRESSION} with regex, {cache: TOKENS} with overlong, {kind: Stdin, tests: COLUMN}"
        " with code",
        check=lambda r: r.name is None or not missing_arguments(r.name, r.args),
        cel=None,
    )


MODEL_AND_DATA = (
    exactly_one(ModelSpec, "path", "random"),
    Rule(
        on=ModelSpec,
        field="revision",
        wrong="there is no hub id that it could belong to",
        allowed="only beside path",
        check=lambda m: m.revision is None or m.path is not None,
        cel="!has(self.revision) || has(self.path)",
    ),
    exactly_one(DataSource, "path", "synthetic", "seeds"),
    exactly_one(EvaluationSet, "path", "synthetic", "seeds"),
    *(_chat_rule(source) for source in (DataSource, DataSpec, EvaluationSet)),
    *_weights_rules(),
    Rule(
        on=DataSpec,
        field="",
        wrong="needs exactly one of path, synthetic, seeds and sources",
        allowed="one of path, synthetic, seeds, sources (not empty), and none of the others",
        check=lambda d: sum(one is not None for one in (d.path, d.synthetic, d.seeds)) + bool(d.sources) == 1,
        cel="(has(self.path) ? 1 : 0) + (has(self.synthetic) ? 1 : 0) + (has(self.seeds) ? 1 : 0)"
        " + (size(self.sources) > 0 ? 1 : 0) == 1",
    ),
    Rule(
        on=DataSpec,
        field="sources",
        wrong="two sources have the same name",
        allowed="a different name for each source",
        check=_source_names_differ,
        cel="self.sources.all(a, !has(a.name) || self.sources.exists_one(b, has(b.name) && b.name == a.name))",
    ),
    exactly_one(RewardSpec, "name", "python", "parts"),
    exactly_one(RewardPart, "name", "python"),
    *(rule for function in (RewardSpec, RewardPart) for rule in _reward_rules(function)),
    Rule(
        on=RewardSpec,
        field="parts",
        wrong="two parts are recorded by the same name",
        allowed="a recordAs for each of them",
        check=_part_names_differ,
        cel=None,
    ),
    Rule(
        on=RewardSpec,
        field="by",
        wrong="is the column that rows of parts are values of",
        allowed="by and rows in one or more parts, or neither",
        check=lambda r: (r.by is not None) == any(part.rows for part in r.parts or []),
        cel="has(self.by) == (has(self.parts) && self.parts.exists(p, has(p.rows)))",
    ),
    Rule(
        on=RLJobSpec,
        field="reward",
        wrong="is missing, and not every data source has its own",
        allowed="spec.reward, or a reward in each data source",
        check=lambda s: s.reward is not None or _all_have_reward(s),
        cel="has(self.reward) || (size(self.data.sources) > 0"
        " ? self.data.sources.all(s, has(s.reward)) : has(self.data.reward))",
    ),
    Rule(
        on=RLJobSpec,
        field="evaluation.data.reward",
        wrong="is missing, and there is no spec.reward",
        allowed="spec.reward, or evaluation.data.reward",
        check=lambda s: (
            s.evaluation is None
            or s.reward is not None
            or s.evaluation.data is None
            or s.evaluation.data.reward is not None
        ),
        cel="!has(self.evaluation) || has(self.reward) || !has(self.evaluation.data)"
        " || has(self.evaluation.data.reward)",
    ),
    Rule(
        on=RLJobSpec,
        field="evaluation.sets",
        wrong="not every set has a reward, and there is no spec.reward",
        allowed="spec.reward, or a reward in each of the sets",
        check=lambda s: (
            s.evaluation is None or s.reward is not None or all(e.reward is not None for e in s.evaluation.sets or [])
        ),
        cel="!has(self.evaluation) || has(self.reward) || !has(self.evaluation.sets)"
        " || self.evaluation.sets.all(e, has(e.reward))",
    ),
)


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
        cel=f"({absent} !(self.algorithm.name in {_quoted(names)})) || self.rollout.samplesPerPrompt >= {least}",
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
    among = f"!(self.name in {_quoted(names)})" if len(names) < len(others) else f"self.name in {_quoted(others)}"
    return Rule(
        on=AlgorithmSpec,
        field=field,
        wrong="changes nothing with this algorithm",
        allowed="leave it out",
        check=lambda a: a.name not in names or getattr(a, attribute) == own,
        cel=f"{among} || !({given})",
    )


def _quoted(names: list[str]) -> str:
    return f"[{', '.join(repr(name) for name in names)}]"


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


TRACKER_KEYS = {
    "wandb": ("WANDB_API_KEY",),
    "mlflow": ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
    "clearml": ("CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY"),
    "swanlab": ("SWANLAB_API_KEY",),
    "trackio": ("HF_TOKEN", "TRACKIO_WRITE_TOKEN"),
}
"""Variables with which a tracker's package logs in."""


def _without_keys(spec: Any) -> bool:
    keys = {key for tracker in spec.records.trackers for key in TRACKER_KEYS[tracker.name]}
    return keys.isdisjoint(spec.environment.variables)


TRACKERS = (
    Rule(
        on=RecordsSpec,
        field="trackers",
        wrong="a tracker is named twice",
        allowed="each name at most once",
        check=lambda r: len({t.name for t in r.trackers}) == len(r.trackers),
        cel="self.trackers.all(a, self.trackers.exists_one(b, b.name == a.name))",
    ),
    Rule(
        on=TrackerSpec,
        field="workspace",
        wrong="this tracker has none",
        allowed="only with wandb and swanlab",
        check=lambda t: t.workspace is None or t.name in ("wandb", "swanlab"),
        cel="!has(self.workspace) || self.name in ['wandb', 'swanlab']",
    ),
    Rule(
        on=TrackerSpec,
        field="url",
        wrong="is not used offline",
        allowed="leave it out, or offline: false",
        check=lambda t: t.url is None or not t.offline,
        cel="!has(self.url) || !has(self.offline) || !self.offline",
    ),
    Rule(
        on=RLJobSpec,
        # Not the variables: a message shows the value of what it blames.
        field="records.trackers",
        wrong="environment.variables has the key of one, where everyone who may read the job sees it",
        allowed="keys in a Secret of environment.secrets",
        check=_without_keys,
        cel=None,
    ),
)


PARTIAL_AND_TAIL = (
    Rule(
        on=RolloutSpec,
        field="partial.factor",
        wrong="so many groups could not all be trained on within staleness.max (default: 1)",
        allowed="at most staleness.max + 1",
        check=lambda r: r.partial is None or r.partial.factor <= ((r.staleness and r.staleness.max) or 1) + 1,
        cel="!has(self.partial)"
        " || self.partial.factor <= 1.0 +"
        " (has(self.staleness) && self.staleness.max > 0 ? double(self.staleness.max) : 1.0)",
    ),
    Rule(
        on=RolloutSpec,
        field="tail",
        wrong="a response either goes on in the next step or waits for a step of its own",
        allowed="one of partial and tail",
        check=lambda r: r.tail is None or r.partial is None,
        cel="!has(self.tail) || !has(self.partial)",
    ),
    Rule(
        on=RolloutSpec,
        field="tail.deferLongest",
        wrong="more steps than not would be for deferred groups",
        allowed="at most 0.5",
        check=lambda r: r.tail is None or r.tail.defer_longest <= 0.5,
        # As a bound of the schema it would be 0: the API server cuts the fraction off a bound of a whole number.
        cel="!has(self.tail) || self.tail.deferLongest <= 0.5",
    ),
    Rule(
        on=RolloutSpec,
        field="assignment",
        wrong="where a step ends must not depend on which engine is faster",
        allowed="Fixed with partial and tail",
        check=lambda r: (r.partial is None and r.tail is None) or r.assignment == RolloutAssignment.FIXED,
        cel="(!has(self.partial) && !has(self.tail)) || self.assignment == 'Fixed'",
    ),
    Rule(
        on=RolloutSpec,
        field="oversampling.factor",
        wrong="partial.factor or tail.deferLongest says how many groups grow at once",
        allowed="1, or left out, with partial and tail",
        check=lambda r: (r.partial is None and r.tail is None) or r.oversampling is None or r.oversampling.factor == 1,
        cel="(!has(self.partial) && !has(self.tail)) || !has(self.oversampling) || self.oversampling.factor == 1.0",
    ),
    Rule(
        on=RLJobSpec,
        field="algorithm.tis",
        wrong="tokens of earlier weights are corrected one by one",
        allowed="enabled with level Token, as by default, with rollout.partial",
        check=lambda s: s.rollout.partial is None or (s.algorithm.tis.enabled and s.algorithm.tis.level == "Token"),
        cel="!has(self.rollout.partial) || !has(self.algorithm) || !has(self.algorithm.tis)"
        " || (self.algorithm.tis.enabled && self.algorithm.tis.level == 'Token')",
    ),
)


SPECULATIVE = (
    Rule(
        on=SpeculativeSpec,
        field="minMatch",
        wrong="is more than maxMatch",
        allowed="at most maxMatch",
        check=lambda s: s.min_match <= s.max_match,
        cel="self.minMatch <= self.maxMatch",
    ),
    Rule(
        on=RolloutSpec,
        field="minP",
        wrong="vLLM does not apply it to what was guessed",
        allowed="0, or left out, with speculative",
        check=lambda r: r.speculative is None or r.min_p == 0,
        cel="!has(self.speculative) || self.minP == 0.0",
    ),
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
    f" : self.algorithm.name in [{', '.join(repr(name) for name in _WHITENING)}])"
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
        cel=f"self.phases.all(name, name in [{', '.join(repr(name) for name in TIMED_PHASES)}])",
    ),
)


def _engine_arg(name: str, instead: str) -> Rule:
    return Rule(
        on=RolloutSpec,
        field=f"engineArgs.{name}",
        wrong="RLJob sets this engine argument itself",
        allowed=instead if instead.startswith("leave it out") else f"spec.{instead} instead",
        check=lambda r: name not in r.engine_args,
        cel="false",
        at_field=True,
    )


ENGINE_ARGS = tuple(_engine_arg(name, instead) for name, instead in RESERVED_ENGINE_ARGS.items())
