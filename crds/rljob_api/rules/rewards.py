"""Rewards: what may be given to one, and which of them fit a source of data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rljob_api.quantities import to_number
from rljob_api.rewards import BUILTIN_REWARDS, argument_faults, token_limit
from rljob_api.rules.findings import FUNCTION, LEAST_MEMORY, Check, Finding, argument_name, named_object, one_line
from rljob_api.rules.places import reward_functions
from rljob_api.rules.variables import NEVER_GIVEN
from rljob_api.spec import OversamplingSpec, RewardPart, RewardSpec, RLJobSpec

_RESERVED_ARGUMENTS = ("prompt", "response", "label", "finish_reason")


def _reward(reward: Any) -> Iterator[Finding]:
    if to_number(reward.memory) < LEAST_MEMORY:
        yield Finding(("memory",), "is too little for a process that imports Python", "at least 64Mi")
    if reward.error_score != 0 and reward.on_error != "Score":
        yield Finding(("errorScore",), "has no effect with onError: Fail", "only with onError: Score")
    for i, name in enumerate(reward.environment):
        if name in NEVER_GIVEN:
            yield Finding(("environment", i), f"{name} is never given to a reward", "another variable")
    if reward.parts is not None and reward.args:
        yield Finding(("args",), "has no effect beside parts", "in each of the parts")
    yield from _function(reward)


def _function(reward: Any) -> Iterator[Finding]:
    if reward.name is not None:
        for key, wrong, allowed in argument_faults(reward.name, reward.args):
            yield Finding(("args", key), wrong, allowed)
    yield from named_object(("python",), reward.python, FUNCTION)
    for name in reward.args if reward.python is not None else ():
        if name in _RESERVED_ARGUMENTS:
            yield Finding(("args", name), "is given to every reward function already", "another name")
        else:
            yield from argument_name("args", name)


def _oversampling(oversampling: Any) -> Iterator[Finding]:
    yield from named_object(("function",), oversampling.function, FUNCTION)


def _rewards(spec: Any) -> Iterator[Finding]:
    """Built-in rewards that do not fit a source or the rollout."""
    seen = set()
    for (place, function), (at, source) in reward_functions(spec):
        facts = BUILTIN_REWARDS.get(function.name)
        if getattr(function, "rows", None):
            # It may score no row of this source: the rows tell.
            facts = None
        if facts is not None and facts.compares and source.label_key is None:
            wrong = f"compares with a label, but labelKey of {'.'.join(map(str, at))} is null"
            yield Finding((*place, "name"), wrong, "a labelKey")
        elif facts is not None and facts.compares and source.seeds is not None:
            wrong = f"compares with a label, and seeds, which {'.'.join(map(str, at))} has, have none"
            yield Finding((*place, "name"), wrong, "environment, format, length, overlong or a function")
        if function.name == "environment" and source.environment is None and not getattr(function, "rows", None):
            wrong = f"is the reward of an environment, and {'.'.join(map(str, at))} has none"
            yield Finding((*place, "name"), wrong, "another reward for this source")
        elif function.name == "environment" and source.environment is not None and source.environment.tools is not None:
            wrong = f"is 0 in each episode of {'.'.join(map(str, at))}, whose environment is tools"
            yield Finding((*place, "name"), wrong, "a reward of the last answer: exact, math or a function")
        if function.name == "match" and source.environment is not None:
            wrong = f"compares tokens of one response, and an episode of {'.'.join(map(str, at))} has several"
            yield Finding((*place, "name"), wrong, "exact, math or a function, which get its last answer")
        if function.name in ("length", "overlong") and source.environment is not None and "limit" not in function.args:
            wrong = f"needs a limit: an episode of {'.'.join(map(str, at))} has no one response that it could be of"
            yield Finding((*place, "args"), wrong, "limit: TOKENS, of all answers of an episode together")
        cache = function.args.get("cache")
        if function.name == "overlong" and place not in seen and isinstance(cache, int):
            limit = token_limit(function.args, spec.rollout.max_response_tokens)
            if cache > limit:
                wrong = "every response would be punished"
                yield Finding((*place, "args", "cache"), wrong, f"at most the limit, {limit} tokens")
        seen.add(place)


REWARD_CHECKS: dict[type, tuple[Check, ...]] = {
    RewardPart: (_function,),
    RewardSpec: (_reward, one_line("by")),
    OversamplingSpec: (_oversampling,),
    RLJobSpec: (_rewards,),
}
