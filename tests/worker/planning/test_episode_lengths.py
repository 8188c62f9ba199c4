"""Lengths of sequences in jobs with environments, and what follows from them."""

from __future__ import annotations

from typing import Any

import pytest
from published_models import published

from rljob_api import RLJobSpec, derived
from rljob_worker.engine.arguments import max_model_length
from rljob_worker.planning.plan import plan_memory

ONCE: dict[str, Any] = {"path": "/data/a.jsonl"}
LAKE: dict[str, Any] = {"seeds": {"count": 9}, "environment": {"name": "FrozenLake"}}
HELD_OUT: dict[str, Any] = {"data": {**LAKE, "seeds": {"first": 9, "count": 9}}}


def spec(data: dict[str, Any], **blocks: Any) -> RLJobSpec:
    return RLJobSpec.model_validate(
        {
            **{"steps": 1, "model": {"path": "/models/a"}, "data": data, "reward": {"name": "format"}},
            "rollout": {"promptsPerStep": 4, "samplesPerPrompt": 2, "maxResponseTokens": 500, "kvCacheBytes": 2**30},
            "episodes": {"maxTurns": 10, "maxTokensPerTurn": 64, "maxTokens": 2000},
            "resources": {"profile": "ascend-a2"},
            **blocks,
        }
    )


@pytest.mark.parametrize(
    ("data", "evaluation", "sampled", "sample", "sequence"),
    [
        (ONCE, None, 500, 600, None),
        (ONCE | {"maxPromptTokens": 100}, None, 500, 600, 600),
        (ONCE | {"maxPromptTokens": 100}, {"data": ONCE}, 500, 600, None),
        (ONCE | {"maxPromptTokens": 100}, HELD_OUT, 500, 600, 2000),
        (LAKE, None, 640, 2000, 2000),
        (LAKE, HELD_OUT, 640, 2000, 2000),
        (LAKE, {"data": ONCE}, 640, 2000, None),
        ({"sources": [LAKE, ONCE]}, None, 640, 2000, None),
        ({"sources": [LAKE, ONCE], "maxPromptTokens": 100}, None, 640, 2000, 2000),
        ({"sources": [LAKE, ONCE], "maxPromptTokens": 1600}, None, 640, 2100, 2100),
    ],
)  # fmt: skip
def test_lengths(data: dict[str, Any], evaluation: Any, sampled: int, sample: int, sequence: int | None) -> None:
    job = spec(data, evaluation=evaluation)
    assert derived.longest_sampled(job) == sampled
    assert derived.longest_sample(job, data.get("maxPromptTokens", 100)) == sample
    assert derived.longest_sequence(job) == sequence
    model = published("Qwen3-4B")
    assert max_model_length(job, model) == (model.max_position_embeddings if sequence is None else sequence)


def test_answers_are_as_long_as_responses_where_nothing_else_is_said_and_no_longer_than_an_episode() -> None:
    job = spec(LAKE, episodes={"maxTurns": 10, "maxTokens": 2000})
    assert derived.max_tokens_per_turn(job) == 500
    assert derived.longest_sampled(job) == 2000


def test_an_environment_can_be_made_anew_unless_it_is_code_that_does_not_say_so() -> None:
    by_kind = [{"name": "Sokoban"}, {"gymnasium": {"id": "CartPole-v1"}}, {"python": "a:B"}]
    for environment, default in zip(by_kind, (True, True, False)):
        for given, wanted in ((None, default), (True, True), (False, False)):
            job = spec({**LAKE, "environment": environment | {"deterministic": given}})
            ((place, found),) = derived.environments(job)
            assert (place, derived.is_deterministic(found)) == ("data", wanted)


def test_memory_is_planned_for_whole_episodes() -> None:
    plan = plan_memory(spec(LAKE), published("Qwen3-4B"))
    assert (plan.batch.longest, plan.batch.assumed_prompt) == (2000, False)
    assert plan.batch.tokens == 8 * 2000
    assert plan.batch.responses == 8 * 640
    longer = plan_memory(spec(LAKE, episodes={"maxTurns": 10, "maxTokens": 4000}), published("Qwen3-4B"))
    assert longer.engine.kv_needed == 2 * plan.engine.kv_needed
