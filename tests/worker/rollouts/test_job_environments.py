"""The environments of a job, from its manifest to what the generating loop has of them."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from rljob_api.spec import RLJobSpec
from rljob_worker.data.dataset import PromptSource
from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer
from rljob_worker.environments.base import Answer, Began, Stepped
from rljob_worker.environments.hosts import EnvironmentHosts
from rljob_worker.errors import UserError
from rljob_worker.flow import Finish
from rljob_worker.flow.pool import OpenGroups
from rljob_worker.flow.turns import Budget
from rljob_worker.rollouts.batch import train_batch
from rljob_worker.rollouts.growth import Growth
from rljob_worker.rollouts.policies.base import Assignment
from rljob_worker.rollouts.turns import Beginning
from rljob_worker.rollouts.worlds import JobEnvironments, plain
from rljob_worker.trainer.batches import PackedBatch, plan_step
from rljob_worker.trainer.dealing import Dealing
from rljob_worker.types import Generation, Prompt, SamplingParams

ROOT = Path(__file__).parents[3]

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


def agent_spec(name: str = "examples/agent.py:play", **episodes: Any) -> RLJobSpec:
    """The example's data and agent, or another one."""
    source = {
        "path": str(ROOT / "examples/tools.jsonl"),
        "applyChatTemplate": True,
        "environment": {"agent": {"python": f"{ROOT}/{name}"}, "processes": 1, "perProcess": 8},
    }
    content = spec_of().model_dump(by_alias=True, exclude={"data", "evaluation"})
    content["episodes"] |= {"maxTurns": 2, "maxTokens": 48, **episodes}
    return RLJobSpec.model_validate({**content, "data": source})


def prompted(spec: RLJobSpec, folder: Path) -> tuple[JobEnvironments, PreTrainedTokenizerBase, dict[str, Prompt]]:
    made = JobEnvironments(spec)
    tokenizer = tokenizer_of(spec, made, folder)
    return made, tokenizer, dict(PromptSource(spec, tokenizer).first())


def test_an_agent_is_begun_with_the_first_row(tmp_path: Path) -> None:
    made, tokenizer, first = prompted(agent_spec(), tmp_path)
    assert made.tools() == {}
    worlds = made.worlds(tokenizer, tmp_path, first)
    asked = worlds["spec.data"].observations.conversation([("user", "box a"), ("assistant", "b"), ("user", "nothing")])
    vocabulary = tokenizer.get_vocab()
    assert vocabulary["<unk>"] not in asked
    assert [vocabulary[word] for word in ("box", "a", "b", "nothing")] == [
        token for token in asked if tokenizer.convert_ids_to_tokens(token) in ("box", "a", "b", "nothing")
    ]


def test_an_agent_that_cannot_begin_is_refused_by_its_row(tmp_path: Path) -> None:
    cases = "tests/worker/environments/agent_cases.py"
    # It has a message of the system, and the row has none.
    made, tokenizer, first = prompted(agent_spec(f"{cases}:openai_client", maxTokens=7), tmp_path / "long")
    with pytest.raises(UserError, match=r"^spec.episodes.maxTokens: 7, and the first call of spec.data.*; allowed: 9"):
        made.worlds(tokenizer, tmp_path, first)
    made, tokenizer, first = prompted(agent_spec(maxObservationTokens=1), tmp_path / "cut")
    with pytest.raises(
        UserError,
        match=r"^spec.episodes.maxObservationTokens: 1, and messages\[0\] \(user\) of .* has 2 tokens: .*; allowed: 2",
    ):
        made.worlds(tokenizer, tmp_path, first)
    made, tokenizer, first = prompted(agent_spec(f"{cases}:silent"), tmp_path / "silent")
    with pytest.raises(UserError, match=r"^spec.data.environment: row .*before it called the policy"):
        made.worlds(tokenizer, tmp_path, first)
    with pytest.raises(UserError, match=r"^spec.data.environment.agent.python: .*has no 'nobody'"):
        JobEnvironments(agent_spec(f"{cases}:nobody"))


@pytest.mark.parametrize("forget", [False, True])
def test_the_examples_agent_plays_with_a_policy_that_answers_right(tmp_path: Path, forget: bool) -> None:
    spec = agent_spec()
    assert spec.data.environment is not None
    spec.data.environment.args["forget"] = forget
    made, tokenizer, first = prompted(spec, tmp_path)
    vocabulary, end = tokenizer.get_vocab(), int(tokenizer.eos_token_id or 0)

    def responses(shares: Any, sampling: SamplingParams, version: int, occupancy: Any, **_: Any) -> Any:
        for share in shares:
            for key, request in share:
                # The opening of the answer is behind the last word, which is the box or the digit in it.
                word = tokenizer.convert_ids_to_tokens(request.prompt_token_ids[-2])
                ids = np.array([vocabulary[str(word)], end])
                yield [(key, Generation(ids, np.full(2, -0.5, np.float32), "stop"))]

    generator: Any = SimpleNamespace(responses=responses, longest={})
    calls: Any = SimpleNamespace(attribute=lambda *_: None)
    scored: list[Any] = []
    inputs: Any = SimpleNamespace(tokenizer=tokenizer, rewards=SimpleNamespace(submit=scored.extend))
    worlds = made.worlds(tokenizer, tmp_path, first)
    growth, groups = Growth(generator, calls, inputs, threading.Event(), worlds), OpenGroups()
    (hosts,) = made.hosts
    occupancy: Any = None
    with hosts:
        growth.begin(groups, [Beginning(0, first["spec.data"], 7)], 4, 0)
        growth.grow(groups, Assignment([[0]]), SamplingParams(max_tokens=2), 0, occupancy)
    (group,) = groups.groups
    assert [one.finish for one in group.episodes] == [Finish.ENVIRONMENT] * 4
    assert [(one.turns[-1].reward, one.turns[-1].values["success"]) for one in group.episodes] == [(1.5, 1.0)] * 4
    assert [turn.stream for turn in group.episodes[0].turns] == [0, int(forget)]
    said = [" ".join(tokenizer.convert_ids_to_tokens(stream.ids)) for stream in group.episodes[0].streams]
    ways = ["<|user|> box a <|assistant|> a </s>", "<|user|> 1 <|assistant|> 1 </s>"]
    assert [one.replace(tokenizer.eos_token, "</s>") for one in said] == (ways if forget else [" ".join(ways)])
    assert [(one.prompt.text, one.text, len(one.turns)) for one in scored] == [("box a", "1", 2)] * 4
    batch = PackedBatch(train_batch([group], np.arange(4, dtype=np.float32)))
    assert [update.num_sequences for update in plan_step(batch, 2, Dealing(1000), 0)] == [4, 4] if forget else [2, 2]
