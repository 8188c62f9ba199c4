"""Episodes of FrozenLake on a real engine: what was sampled, turn by turn, is what the whole stream says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_process import RemoteEngine
from rollout_models import END, FIRST_WORD, VOCAB
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rljob_api.spec import RewardSpec
from rljob_worker.data.tokenizer import CHAT_TEMPLATE
from rljob_worker.data.turns import TurnRenderer, template_of
from rljob_worker.environments.base import AgentSource
from rljob_worker.environments.hosts import EnvironmentHosts
from rljob_worker.environments.load import Source
from rljob_worker.environments.place import environment_place
from rljob_worker.flow import Finish, Group
from rljob_worker.flow.pool import OpenGroups
from rljob_worker.flow.turns import Budget
from rljob_worker.rollouts.growth import Growth
from rljob_worker.rollouts.observations import Observations
from rljob_worker.rollouts.policies.base import Assignment
from rljob_worker.rollouts.turns import Beginning
from rljob_worker.rollouts.world import World
from rljob_worker.types import Prompt, SamplingParams

PLACE = "spec.data"
WORDS = ["<|system|>", "<|user|>", "<|assistant|>", "P", "_", "O", "G", "X", "V", "Left", "Down", "Right", "Up"]
SAMPLING = SamplingParams(max_tokens=2)
BUDGET = Budget(4, 2, 60)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentHosts]:
    source = Source(name="FrozenLake", args={"size": 3, "instructions": False})
    folder = tmp_path_factory.mktemp("lake")
    place = environment_place(source, memory=2**30, network=True, workdir=folder)
    with EnvironmentHosts(source, place, processes=1, per_process=32) as made:
        yield made


def tokenizer() -> PreTrainedTokenizerBase:
    """The words of the lake in the model's vocabulary, of which the first many words are those."""
    words = {"<s>": 0, "</s>": END, "<pad>": 2}
    words |= {word: FIRST_WORD + place for place, word in enumerate(WORDS)}
    words |= {f"w{number}": number for number in range(FIRST_WORD + len(WORDS), VOCAB)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", unk_token="<pad>", additional_special_tokens=WORDS[:3],
        chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentHosts]:
    """Agents whose conversations go on, begin anew, and are rewritten."""
    source = Source(agent=AgentSource(f"{Path(__file__).parents[1]}/environments/agent_cases.py:rewrites"))
    place = environment_place(source, memory=2**30, network=True, workdir=tmp_path_factory.mktemp("agents"))
    with EnvironmentHosts(source, place, processes=1, per_process=32, deterministic=False) as made:
        yield made


def play(engine: RemoteEngine, hosts: EnvironmentHosts, budget: Budget = BUDGET) -> list[Group]:
    """Six groups of four, together."""
    words = tokenizer()
    renderer = TurnRenderer(template_of(words), words, [END], "the template")

    def responses(shares: Any, sampling: SamplingParams, version: int, occupancy: Any, **_: Any) -> Any:
        asked = [one for share in shares for one in share]
        if asked:
            generations = engine.call("generate", [request for _, request in asked], sampling, version)
            yield [(key, generation) for (key, _), generation in zip(asked, generations)]

    generator: Any = SimpleNamespace(responses=responses, longest={})
    calls: Any = SimpleNamespace(attribute=lambda *_: None)
    inputs: Any = SimpleNamespace(tokenizer=words, rewards=SimpleNamespace(submit=lambda samples: None))
    world = World(hosts, Observations(renderer, words, 64), budget)
    growth, groups = Growth(generator, calls, inputs, threading.Event(), {PLACE: world}), OpenGroups()
    prompts = [
        Prompt(f"s/{seed}", "s", "", (), None, RewardSpec(name="match"), environment=PLACE, seed=seed)
        for seed in range(6)
    ]
    beginnings = [Beginning(place, prompt, 1000 * place) for place, prompt in enumerate(prompts)]
    # Tests that share the engine may have handed weights over.
    version = engine.call("weight_version")
    growth.begin(groups, beginnings, 4, version)
    occupancy: Any = None
    growth.grow(groups, Assignment([range(6)]), SAMPLING, version, occupancy)
    return groups.groups


@pytest.mark.slow
def test_every_sampled_token_has_the_log_probability_of_one_pass_over_its_stream(
    engine: RemoteEngine, hosts: EnvironmentHosts, tmp_path: Path
) -> None:
    groups = play(engine, hosts)
    episodes = [episode for group in groups for episode in group.episodes]
    assert {one.finish for one in episodes} <= {Finish.TURNS, Finish.ENVIRONMENT, Finish.LENGTH}
    assert max(len(one.turns) for one in episodes) == 4
    scores = engine.call("score", [one.stream.ids for one in episodes])
    for episode, score in zip(episodes, scores):
        sampled = episode.stream.sampled
        assert np.abs(episode.stream.log_probs[sampled] - score[sampled[1:]]).max() <= 1e-4
    again = play(engine, hosts)
    assert [one.stream for group in again for one in group.episodes] == [one.stream for one in episodes], "to the bit"
    assert again == groups


@pytest.mark.slow
def test_every_token_of_every_stream_of_an_agent_has_the_log_probability_of_one_pass(
    engine: RemoteEngine, agents: EnvironmentHosts
) -> None:
    groups = play(engine, agents, Budget(8, 2, 60))
    episodes = [episode for group in groups for episode in group.episodes]
    assert {one.finish for one in episodes} == {Finish.ENVIRONMENT}
    assert {len(one.streams) for one in episodes} == {4}
    assert [turn.stream for turn in episodes[0].turns] == [0, 1, 0, 0, 2, 3]
    streams = [stream for one in episodes for stream in one.streams]
    for stream, score in zip(streams, engine.call("score", [stream.ids for stream in streams])):
        assert np.abs(stream.log_probs[stream.sampled] - score[stream.sampled[1:]]).max() <= 1e-4
    again = play(engine, agents, Budget(8, 2, 60))
    assert [one.streams for group in again for one in group.episodes] == [one.streams for one in episodes]
    assert again == groups
