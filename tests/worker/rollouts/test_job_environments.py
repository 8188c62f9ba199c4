"""The environments of a job, from its manifest to what the generating loop has of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rljob_api.spec import RLJobSpec
from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer
from rljob_worker.environments.base import Answer, Began, Stepped
from rljob_worker.environments.hosts import EnvironmentHosts
from rljob_worker.errors import UserError
from rljob_worker.flow.turns import Budget
from rljob_worker.rollouts.worlds import JobEnvironments, plain

LAKE = {"name": "FrozenLake", "args": {"size": 3, "instructions": False}}


def spec_of(environment: dict[str, Any] | None = None, **data: Any) -> RLJobSpec:
    """Without the rules of manifests."""
    lake = {**LAKE, **(environment or {})}
    return RLJobSpec.model_validate(
        {
            "steps": 1,
            "model": {"random": {"config": {"model_type": "qwen3"}}},
            "data": {"seeds": {"count": 20}, "environment": lake, **data},
            "evaluation": {"data": {"name": "held", "seeds": {"first": 50, "count": 4}, "environment": lake}},
            "reward": {"name": "environment"},
            "episodes": {"maxTurns": 3, "maxTokens": 60, "maxTokensPerTurn": 2, "after": " >", "onError": "Fail"},
            "rollout": {"promptsPerStep": 4, "samplesPerPrompt": 2, "maxResponseTokens": 2},
            "training": {"precision": "fp32"},
            "resources": {"profile": "cpu"},
        }
    )


def tokenizer_of(spec: RLJobSpec, made: JobEnvironments, folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(prepare_tokenizer(spec, folder, made.spoken()))


def taken(hosts: EnvironmentHosts) -> Answer:
    """The answer that is awaited: each has a deadline."""
    while not (found := hosts.take(1.0)):
        pass
    return found[0][1]


def test_sources_of_equal_settings_share_hosts_and_have_their_own_words(tmp_path: Path) -> None:
    spec = spec_of()
    made = JobEnvironments(spec)
    (hosts,) = made.hosts
    tokenizer = tokenizer_of(spec, made, tmp_path)
    assert {"P", "_", "O", "G", "Left", "Down", "Right", "Up"} <= set(tokenizer.get_vocab())
    worlds = made.worlds(tokenizer, tmp_path)
    assert list(worlds) == ["spec.data", "spec.evaluation.data"]
    world = worlds["spec.data"]
    assert (world.hosts, world.budget, world.error_reward) == (hosts, Budget(3, 2, 60), None)
    with hosts:
        hosts.start()
        hosts.begin(0, 7)
        began = taken(hosts)
        hosts.step(0, "Down")
        stepped = taken(hosts)
    assert isinstance(began, Began)
    assert isinstance(stepped, Stepped)
    unknown = tokenizer.get_vocab()["<unk>"]
    for ids in (world.observations.first(began.observation), world.observations.after(None, stepped.observation)):
        # The text behind an observation is no word that was heard.
        assert [place for place, token in enumerate(ids) if token == unknown] == [len(ids) - 1]
        assert len(ids) == 9 + 1


def test_an_environment_without_enough_places_is_refused() -> None:
    with pytest.raises(UserError, match=r"^spec.data.environment.perProcess: 8 episodes .* hold 6 environments"):
        JobEnvironments(spec_of({"processes": 2, "perProcess": 3}))


def test_a_process_may_hold_one_environment() -> None:
    JobEnvironments(spec_of({"processes": 64, "perProcess": 1}))


def test_an_environment_that_cannot_be_made_is_refused_by_its_field() -> None:
    with pytest.raises(UserError, match=r"^spec.data.environment.args.holes: there is no such|^spec.data.environment"):
        JobEnvironments(spec_of({"args": {"depth": 3}}))


def test_a_job_without_environments_has_none() -> None:
    content = spec_of().model_dump(by_alias=True, exclude={"data", "evaluation", "episodes"})
    spec = RLJobSpec.model_validate({**content, "data": {"synthetic": {}}})
    made = JobEnvironments(spec)
    assert (made.hosts, made.spoken()) == ([], [])


def test_what_is_said_stands_between_two_texts_where_there_is_no_template() -> None:
    render = plain("[", "]")
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert render(said[:1], True) == "a]"
    assert render(said, True) == "a]b[c]"
