"""Built-in rewards whose time is linear in the response: they are scored in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rljob_api.rewards import token_limit
from rljob_api.spec import RewardSpec
from rljob_worker.flow.turns import total_reward
from rljob_worker.rewards.builtin import exact, gsm8k, length_penalty, make_format, overlong_penalty
from rljob_worker.rewards.match import Match
from rljob_worker.rewards.score_calls import RewardSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Inline:
    """One of these rewards, with its arguments."""

    score: Callable[[RewardSample, str], tuple[float, dict[str, float]]]
    """Score of a response and its text, and the values recorded beside it."""
    needs_text: bool


def inline(reward: RewardSpec, tokenizer: PreTrainedTokenizerBase, max_response_tokens: int) -> Inline | None:
    """A built-in reward whose time is linear in the response, whatever that is: it needs no process to be ended."""
    args = reward.args
    limit = token_limit(args, max_response_tokens)
    if reward.name == "exact":
        return _alone(lambda sample, text: exact(text, _label(sample)), needs_text=True)
    if reward.name == "gsm8k":
        return _alone(lambda sample, text: gsm8k(text, _label(sample), **args), needs_text=True)
    if reward.name == "format":
        fits = make_format(**args)
        return _alone(lambda _, text: fits(text), needs_text=True)
    if reward.name == "length":
        target = args.get("target", 0)
        return _alone(lambda sample, _: length_penalty(_tokens(sample), limit, target), needs_text=False)
    if reward.name == "overlong":
        return _alone(lambda sample, _: overlong_penalty(_tokens(sample), limit, args["cache"]), needs_text=False)
    if reward.name == "match":
        match = Match(tokenizer)
        return _alone(lambda sample, _: match(sample.generation.token_ids, _label(sample)), needs_text=False)
    if reward.name == "environment":
        return Inline(_of_environment, needs_text=False)
    return None


def _alone(score: Callable[[RewardSample, str], float], *, needs_text: bool) -> Inline:
    """A score with nothing beside it."""
    return Inline(lambda sample, text: (score(sample, text), {}), needs_text)


def _of_environment(sample: RewardSample, _: str) -> tuple[float, dict[str, float]]:
    """The reward of an episode, and the numbers that came with its last turn."""
    if not sample.turns:
        raise ValueError("the prompt has no environment")
    return total_reward(sample.turns), dict(sample.turns[-1].values)


def _label(sample: RewardSample) -> str:
    if sample.prompt.label is None:
        raise ValueError("the prompt has no label")
    return sample.prompt.label


def _tokens(sample: RewardSample) -> int:
    return len(sample.generation.token_ids)
