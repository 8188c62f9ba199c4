"""Rules about environments and the episodes that a policy has with them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any

from rljob_api.algorithms import ALGORITHMS
from rljob_api.base import ApiModel
from rljob_api.derived import environments
from rljob_api.environments import Form
from rljob_api.rules.core import Rule, exactly_one
from rljob_api.rules.findings import Check, Finding
from rljob_api.spec import (
    DataSource,
    DataSpec,
    EpisodeError,
    EpisodesSpec,
    EvaluationSet,
    GymnasiumSpec,
    Pace,
    RLJobSpec,
    TextEnvironmentSpec,
    ToolSpec,
)
from rljob_api.tool_parsers import TOOL_PARSERS

_ANYWHERE = (
    "(size(self.data.sources) == 0 && has(self.data.environment) || self.data.sources.exists(s, has(s.environment))"
    " || has(self.evaluation) && (has(self.evaluation.data) && has(self.evaluation.data.environment)"
    " || has(self.evaluation.sets) && self.evaluation.sets.exists(s, has(s.environment))))"
)


_TOOLS_ANYWHERE = (
    "(size(self.data.sources) == 0 && has(self.data.environment) && has(self.data.environment.tools)"
    " || self.data.sources.exists(s, has(s.environment) && has(s.environment.tools))"
    " || has(self.evaluation) && (has(self.evaluation.data) && has(self.evaluation.data.environment)"
    " && has(self.evaluation.data.environment.tools) || has(self.evaluation.sets)"
    " && self.evaluation.sets.exists(s, has(s.environment) && has(s.environment.tools))))"
)


def _with_rows(environment: Any) -> bool:
    """Whether its episodes begin with rows."""
    return environment.tools is not None or environment.agent is not None


_PENALTY: float = GymnasiumSpec.model_fields["format_penalty"].default


def _source_rules(source: type[ApiModel]) -> Iterator[Rule]:
    yield Rule(
        on=source,
        field="environment",
        wrong="its episodes begin with seeds, those of tools and agents with rows",
        allowed="environment with seeds, environment.tools or agent with rows, or neither",
        check=lambda s: (s.environment is not None and not _with_rows(s.environment)) == (s.seeds is not None),
        cel="(has(self.environment) && !has(self.environment.tools) && !has(self.environment.agent))"
        " == has(self.seeds)",
    )
    yield Rule(
        on=source,
        field="applyChatTemplate",
        wrong="a chat template shows tools, and an agent's messages",
        allowed="true with environment.tools or agent",
        check=lambda s: s.environment is None or not _with_rows(s.environment) or s.apply_chat_template,
        cel="!has(self.environment) || !has(self.environment.tools) && !has(self.environment.agent)"
        " || self.applyChatTemplate",
    )


def _without(field: str, wrong: str) -> Rule:
    """Something of a rollout that episodes cannot have."""
    return Rule(
        on=RLJobSpec,
        field=f"rollout.{field}",
        wrong=wrong,
        allowed="leave it out with episodes",
        check=lambda s: s.episodes is None or getattr(s.rollout, field) is None,
        cel=f"!has(self.episodes) || !has(self.rollout.{field})",
    )


def _of_actions(field: str, attribute: str, cel: str, default: object) -> Rule:
    """A setting of answers that name an action."""
    return Rule(
        on=GymnasiumSpec,
        field=field,
        wrong="has no effect without actions: the environment takes every text",
        allowed="only with actions",
        check=lambda g: bool(g.actions) or getattr(g, attribute) == default,
        cel=f"size(self.actions) > 0 || {cel}",
    )


def _turn_fits(spec: Any) -> bool:
    own = spec.episodes and spec.episodes.max_tokens_per_turn
    return own is None or own <= spec.rollout.max_response_tokens


def _answer_fits(spec: Any) -> bool:
    if spec.episodes is None:
        return True
    turn = spec.episodes.max_tokens_per_turn
    answer = spec.rollout.max_response_tokens if turn is None else turn
    return bool(spec.episodes.max_tokens > answer)


def _parses_tools(spec: Any) -> bool:
    tools = any(one.tools is not None for _, one in environments(spec))
    return spec.episodes is None or tools == (spec.episodes.tool_parser is not None)


def _with_agents(field: str, wrong: str, allowed: str, check: Callable[[Any], bool]) -> Rule:
    """A rule about jobs that have an agent, of readers of the manifest with this package: in CEL it would take a large
    share of the CRD's size."""
    return Rule(
        on=RLJobSpec,
        field=field,
        wrong=wrong,
        allowed=f"{allowed} with environment.agent",
        check=lambda s: check(s) or all(one.agent is None for _, one in environments(s)),
        cel=None,
    )


def _has_environment(spec: Any) -> bool:
    return any(True for _ in environments(spec))


EPISODES = (
    exactly_one(ToolSpec, "python", "mcp"),
    exactly_one(TextEnvironmentSpec, "name", "gymnasium", "python", "openenv", "tools", "agent"),
    *(rule for source in (DataSource, DataSpec, EvaluationSet) for rule in _source_rules(source)),
    _of_actions("form", "form", f"self.form == '{Form.PLAIN}'", Form.PLAIN),
    _of_actions("formatPenalty", "format_penalty", f"self.formatPenalty == {_PENALTY}", _PENALTY),
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
    Rule(
        on=RLJobSpec,
        field="episodes.maxTokensPerTurn",
        wrong="is more than any answer may have",
        allowed="at most rollout.maxResponseTokens",
        check=_turn_fits,
        cel="!has(self.episodes) || !has(self.episodes.maxTokensPerTurn)"
        " || self.episodes.maxTokensPerTurn <= self.rollout.maxResponseTokens",
    ),
    Rule(
        on=RLJobSpec,
        field="episodes.maxTokens",
        wrong="leaves no room for an observation beside an answer",
        allowed="more than episodes.maxTokensPerTurn, or rollout.maxResponseTokens where that is left out",
        check=_answer_fits,
        cel="!has(self.episodes) || self.episodes.maxTokens > (has(self.episodes.maxTokensPerTurn)"
        " ? self.episodes.maxTokensPerTurn : self.rollout.maxResponseTokens)",
    ),
    Rule(
        on=RLJobSpec,
        field="episodes.toolParser",
        wrong="reads calls of tools out of answers",
        allowed="given where a source has environment.tools, and nowhere else",
        check=_parses_tools,
        cel=f"!has(self.episodes) || has(self.episodes.toolParser) == {_TOOLS_ANYWHERE}",
    ),
    _with_agents(
        "episodes.pace",
        "agents have been run with pace Together alone",
        f"{Pace.TOGETHER}",
        lambda s: s.episodes is None or s.episodes.pace == Pace.TOGETHER,
    ),
    _with_agents(
        "rollout.routerReplay",
        "an engine says the experts of one stream, and a sample of an agent may have several",
        "false",
        lambda s: not s.rollout.router_replay,
    ),
    _with_agents(
        "algorithm.name",
        "a critic has not been trained on samples of several streams",
        "one without a critic",
        lambda s: not ALGORITHMS[s.algorithm.name].needs_critic,
    ),
    Rule(
        on=EpisodesSpec,
        field="pace",
        wrong="has no effect: an episode of one turn has no next one",
        allowed="Together with maxTurns: 1",
        check=lambda e: e.pace == Pace.TOGETHER or e.max_turns > 1,
        cel=f"self.pace == '{Pace.TOGETHER}' || self.maxTurns > 1",
    ),
    Rule(
        on=EpisodesSpec,
        field="maxTurns",
        wrong="what a tool returns would never be read: an episode of one turn ends with the call",
        allowed="2 or more with toolParser",
        check=lambda e: e.tool_parser is None or e.max_turns > 1,
        cel="!has(self.toolParser) || self.maxTurns > 1",
    ),
    Rule(
        on=EpisodesSpec,
        field="errorReward",
        wrong="has no effect with onError: Fail",
        allowed="only with onError: End",
        check=lambda e: e.error_reward == 0 or e.on_error == EpisodeError.END,
        cel="self.errorReward == 0.0 || self.onError == 'End'",
    ),
    _without("partial", "an engine is cut by what it has answered, and an episode has several answers"),
    _without("tail", "a deferred episode would be played a second time from its beginning"),
)


def _parser(episodes: Any) -> Iterator[Finding]:
    name = episodes.tool_parser
    if name is not None and name not in TOOL_PARSERS:
        near = difflib.get_close_matches(name.lower(), TOOL_PARSERS, n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        yield Finding(("toolParser",), f"is none of vLLM's parsers{hint}", ", ".join(TOOL_PARSERS))


def _errors(episodes: Any) -> Iterator[Finding]:
    most = EpisodesSpec.model_fields["max_error_share"].default
    if episodes.on_error == EpisodeError.FAIL and episodes.max_error_share != most:
        yield Finding(("maxErrorShare",), "has no effect with onError: Fail", "only with onError: End")


EPISODE_CHECKS: dict[type, tuple[Check, ...]] = {EpisodesSpec: (_parser, _errors)}
