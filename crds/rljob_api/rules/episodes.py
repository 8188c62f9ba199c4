"""Rules about environments and the episodes that a policy has with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rljob_api.base import ApiModel
from rljob_api.derived import environments
from rljob_api.rules.core import Rule, exactly_one
from rljob_api.spec import DataSource, DataSpec, EvaluationSet, RLJobSpec, TextEnvironmentSpec

_ANYWHERE = (
    "(has(self.data.environment) || self.data.sources.exists(s, has(s.environment))"
    " || has(self.evaluation) && (has(self.evaluation.data) && has(self.evaluation.data.environment)"
    " || has(self.evaluation.sets) && self.evaluation.sets.exists(s, has(s.environment))))"
)


def _source_rules(source: type[ApiModel]) -> Iterator[Rule]:
    yield Rule(
        on=source,
        field="environment",
        wrong="its episodes begin with seeds",
        allowed="environment and seeds together, or neither",
        check=lambda s: (s.environment is None) == (s.seeds is None),
        cel="has(self.environment) == has(self.seeds)",
    )


def _has_environment(spec: Any) -> bool:
    return any(True for _ in environments(spec))


NOT_BUILT = (
    Rule(
        on=TextEnvironmentSpec,
        field="",
        wrong="jobs with environments are not built yet",
        allowed="leave it out; `rljob env` plays one",
        check=lambda _: False,
        cel="false",
    ),
)

EPISODES = (
    *NOT_BUILT,
    exactly_one(TextEnvironmentSpec, "name", "gymnasium", "python"),
    *(rule for source in (DataSource, DataSpec, EvaluationSet) for rule in _source_rules(source)),
    Rule(
        on=RLJobSpec,
        field="episodes",
        wrong="there is no environment that it could be about",
        allowed="only where a data source, or an evaluation's, has an environment",
        check=lambda s: s.episodes is None or _has_environment(s),
        cel=f"!has(self.episodes) || {_ANYWHERE}",
    ),
    Rule(
        on=RLJobSpec,
        field="episodes",
        wrong="is missing, and a data source has an environment",
        allowed="episodes: {maxTurns, maxTokens}",
        check=lambda s: s.episodes is not None or not _has_environment(s),
        cel=f"has(self.episodes) || !{_ANYWHERE}",
    ),
)
