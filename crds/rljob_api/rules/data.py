"""Rules about the model, the data and the rewards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from rljob_api.base import ApiModel
from rljob_api.rewards import missing_arguments, part_name
from rljob_api.rules.core import Rule, exactly_one
from rljob_api.spec import (
    DataSource,
    DataSpec,
    EvaluationSet,
    EvaluationSpec,
    ModelSpec,
    RewardPart,
    RewardSpec,
    RLJobSpec,
)


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
