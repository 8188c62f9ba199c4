"""Samples of several streams in the generating loop: agents that go on, begin anew and come back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_episodes_of_turns import CLOSE, PLACE, Hosts, Loop, Observations

from rljob_api.spec import RewardSpec
from rljob_worker.cli.samples import sample_text
from rljob_worker.driver.replay import asked_spans
from rljob_worker.environments.base import AgentCall, Answer, Began, EnvironmentFailure, FailureKind, Stepped
from rljob_worker.errors import JobError
from rljob_worker.flow import Decision, Episode, Finish, Group, TokenStream
from rljob_worker.flow.episode import stream_seed
from rljob_worker.flow.turns import Budget, Opening, Turn, TurnEnd
from rljob_worker.rollouts import growth as loop
from rljob_worker.rollouts.batch import episode_metrics, train_batch
from rljob_worker.rollouts.rows import turn_rows
from rljob_worker.rollouts.step import Step
from rljob_worker.rollouts.turns import Beginning
from rljob_worker.rollouts.world import World
from rljob_worker.trainer.batches import PackedBatch, plan_step
from rljob_worker.trainer.dealing import Dealing
from rljob_worker.types import Generation, Prompt, RewardResult


class Agents(Hosts):
    """Each call goes on with one of its conversations or begins another one, as the seed says."""

    deterministic = False

    def __init__(self, rng: Random, fails: Any = None, wrong: int | None = None) -> None:
        super().__init__(rng, fails)
        self._streams: Counter[int] = Counter()
        self._wrong = wrong

    def begin(self, key: int, seed: int, options: Any, answers: Any = (), actions: Any = ()) -> None:
        assert not answers, "an agent is not made anew"
        self.open[key], self._streams[key] = (seed, []), 1
        self.begun[seed] += 1
        self._answer(key, Began("hello", {}, AgentCall(0, (("user", "hello"),))))

    def step(self, key: int, action: str, cut: bool = False) -> None:
        seed, actions = self.open[key]
        actions.append(action)
        rng = Random(f"{seed} {len(actions)}")
        answer: Answer = Stepped("", 2.0, True, False)
        if rng.random() > 0.2:
            stream = rng.randint(0, self._streams[key]) if self._wrong is None else self._wrong
            self._streams[key] += stream == self._streams[key]
            text = "abc"[: rng.randint(1, 3)]
            answer = Stepped(text, 0.0, False, False, call=AgentCall(stream, (("user", text),)))
        self._answer(key, answer)


class Conversations(Observations):
    """A token for each character."""

    def conversation(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        return self.first("".join(text for _, text in messages))

    def asked(self, ended_by: int | None, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        return self.after(ended_by, "".join(text for _, text in messages))


class AgentLoop(Loop):
    """The loop over groups of two samples, each an agent's."""

    def __init__(self, rng: Random, budget: Budget, wrong: int | None = None, fails: Any = None) -> None:
        super().__init__(rng, budget)
        self.hosts = Agents(rng, fails, wrong)
        fakes: Any = self.hosts, Conversations()
        self.growth.turns._worlds = {PLACE: World(*fakes, budget)}


@pytest.fixture(autouse=True)
def _texts(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = lambda _, generations: [" ".join(map(str, one.token_ids)) for one in generations]  # noqa: E731
    monkeypatch.setattr(loop, "decode_responses", decode)


@settings(max_examples=60)
@given(
    st.builds(Budget, st.integers(1, 6), st.integers(1, 5), st.integers(8, 40)),
    st.integers(0, 10**6),
    st.integers(1, 4),
)
def test_each_sampled_token_is_in_one_stream_and_trained_once(budget: Budget, start: int, count: int) -> None:
    made = AgentLoop(Random(start), budget)
    made.whole(range(start, start + count))
    groups = made.groups.groups
    requests = [request for batch in made.engines.asked for request in batch]
    assert len({(request.seed, request.prompt_token_ids) for request in requests}) == len(requests)
    answers = 0
    for group in groups:
        for episode in group.episodes:
            assert episode.finish is not None
            assert sorted({turn.stream for turn in episode.turns}) == list(range(len(episode.streams)))
            answers += len(episode.turns)
            for number, stream in enumerate(episode.streams):
                assert len(stream) <= budget.max_tokens
                turns = [turn for turn in episode.turns if turn.stream == number]
                said = [span for span in stream.spans if span.version is not None]
                assert len(said) == len(turns)
                for span, turn in zip(said, turns):
                    ids = tuple(stream.ids.tolist())
                    assert " ".join(map(str, ids[span.start : span.stop])) == turn.action
                    # As it was sampled: with what stood before it, by the noise of its own stream.
                    seed = stream_seed(group.seed + episode.sample, number)
                    assert [(one.seed, one.prompt_token_ids) for one in requests].count((seed, ids[: span.start])) == 1
            assert episode.sampled_length == sum(len(turn.action.split()) for turn in episode.turns)
        assert Group.from_json(json.loads(json.dumps(group.as_json()))) == replace(group, prompt_uid="")
        asked = asked_spans(group, made.groups.prompt(group.ordinal), 3)
        assert sum(len(one.recorded[0]) for one in asked) == sum(group.lengths)
        assert all(one.request in requests or one.request.max_tokens is not None for one in asked)
    assert answers == len(requests)
    assert not made.hosts.open
    advantages = np.arange(1.0, 2.0 * count + 1, dtype=np.float32)
    batch = train_batch(groups, advantages)
    assert len(batch.advantages) == sum(sum(group.lengths) for group in groups)
    expected = np.repeat(advantages, [length for group in groups for length in group.lengths])
    assert batch.advantages.tolist() == expected.tolist()
    updates = plan_step(PackedBatch(batch), 2, Dealing(10**6), 0)
    assert [update.num_tokens for update in updates] == [sum(group.lengths) for group in groups], "two samples each"
    assert [update.num_sequences for update in updates] == [
        sum(len(episode.streams) for episode in group.episodes) for group in groups
    ]


def test_a_call_in_a_stream_that_is_not_there_ends_the_episode() -> None:
    made = AgentLoop(Random(0), Budget(8, 4, 200), wrong=7)
    made.whole(range(8))
    failed = [one for group in made.groups.groups for one in group.episodes if one.finish is Finish.FAILED]
    assert failed
    for episode in failed:
        assert episode.turns[-1].error is not None
        assert episode.turns[-1].error.endswith(": a call in stream 7 of 1")
        assert (episode.turns[-1].reward, len(episode.streams)) == (0.0, 1)


def test_a_conversation_that_the_template_refuses_ends_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Conversations.conversation

    def refusing(self: Conversations, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        if messages[0][1] != "hello":
            raise ValueError("the chat template takes no conversation of tool")
        return whole(self, messages)

    monkeypatch.setattr(Conversations, "conversation", refusing)
    made = AgentLoop(Random(0), Budget(8, 4, 200), wrong=1)
    made.whole(range(8))
    failed = [one for group in made.groups.groups for one in group.episodes if one.finish is Finish.FAILED]
    assert failed
    assert {len(one.streams) for one in failed} == {1}
    assert str(failed[0].turns[-1].error).endswith("the chat template takes no conversation of tool")


def test_agents_that_fail_are_of_the_class_that_their_host_says() -> None:
    fails = {5: (1, FailureKind.DATA, 1), 6: (1, FailureKind.INFRA, 1)}
    made = AgentLoop(Random(0), Budget(8, 4, 200), fails=fails)
    made.whole([5, 6])
    (group,) = made.groups.groups
    assert Counter(one.finish is Finish.FAILED for one in group.episodes)[True] == 1
    assert made.growth.turns.take_given_back() == [1]
    assert not made.hosts.open


def begun_with_rows(made: AgentLoop, seeds: Sequence[int]) -> None:
    """Groups of rows, whose prompts have tokens that no agent uses."""
    for place, seed in enumerate(seeds):
        prompt = Prompt(
            f"s/{seed}", "s", "row", (7, 8, 9), None, RewardSpec(name="match"), environment=PLACE, seed=seed
        )
        made.growth.begin(made.groups, [Beginning(place, prompt, 100 * place)], 2, 3)


@pytest.mark.parametrize("samples", [1, 2])
def test_an_agent_that_fails_before_its_first_call_ends_its_episode(samples: int) -> None:
    made = AgentLoop(Random(0), Budget(8, 4, 200), fails={5: (0, FailureKind.DATA, samples)})
    begun_with_rows(made, [5, 6])
    scored = [one[0].ordinal for one in made.submitted]
    assert scored == ([0] if samples == 2 else []), "one that has no other sample goes to its rewards at once"
    made.grow()
    assert sorted(one[0].ordinal for one in made.submitted) == [0, 1]
    failed = [one for one in made.groups[0].episodes if one.finish is Finish.FAILED]
    assert len(failed) == samples
    for one in failed:
        assert (one.stream.ids.tolist(), one.sampled_length, one.text) == ([7, 8, 9], 0, "")
        assert [(turn.error, turn.reward) for turn in one.turns] == [("seed 5 fails", 0.0)]
        assert turn_rows(one)[0]["tokens"] == 0
    groups = made.groups.groups
    assert Group.from_json(json.loads(json.dumps(groups[0].as_json()))) == replace(groups[0], prompt_uid="")
    assert not made.hosts.open
    batch = train_batch(groups, np.arange(1.0, 5.0, dtype=np.float32))
    updates = plan_step(PackedBatch(batch), 2, Dealing(10**6), 0)
    assert [update.num_tokens for update in updates] == [sum(group.lengths) for group in groups]
    assert sum(int(one.mask.sum()) for update in updates for one in update.micro_batches) == len(batch.advantages)


@pytest.mark.parametrize("most", [3, 200])
def test_a_first_call_that_is_none_of_the_template_s_or_too_long_ends_its_episode(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(self: Conversations, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        if most == 200:
            raise ValueError("the chat template takes no conversation of robot")
        return self.first(messages[0][1])

    monkeypatch.setattr(Conversations, "conversation", refusing)
    made = AgentLoop(Random(0), Budget(8, 2, most))
    begun_with_rows(made, [5])
    assert len(made.submitted) == 1
    (group,) = made.groups.groups
    said = "no conversation of robot" if most == 200 else "leaves no room for an answer"
    assert all(said in str(one.turns[-1].error) for one in group.episodes)
    times = made.growth.turns.take_times()
    assert times is not None
    assert times.failures[FailureKind.DATA] == 2
    assert not made.hosts.open


@pytest.mark.parametrize("error_reward", [None, 0.0])
def test_an_agent_that_fails_before_its_first_call_fails_the_job(error_reward: float | None) -> None:
    """With onError: Fail, or where more fail than the share."""
    made = AgentLoop(Random(0), Budget(8, 4, 200), fails={5: (0, FailureKind.DATA, 2)})
    (place,) = made.growth.turns._worlds
    made.growth.turns._worlds = {place: replace(made.growth.turns._worlds[place], error_reward=error_reward)}
    if error_reward is None:
        with pytest.raises(JobError, match="seed 5 fails"):
            begun_with_rows(made, [5])
        return
    begun_with_rows(made, [5])
    with pytest.raises(JobError, match=r"2 of 2 episodes ended with an error.*: seed 5 fails"):
        made.check_errors()


def an_episode() -> Episode:
    """Two streams with an answer each, and a second answer of the first one."""
    log_probs = np.full(2, -0.5, np.float32)
    answer = Generation(np.array([11, CLOSE]), log_probs, "stop")
    episode = Episode(0, 0, TokenStream.of_prompt([1, 2]), opening=Opening(0, "hello"))
    episode = episode.with_sampled(answer, 3).called(Turn("11 9", "other", 0.0, False), [1, 3], 1)
    episode = episode.with_sampled(answer, 3).called(Turn("11 9", "more", 0.0, False, stream=1), [1, 4, 2], 0)
    return episode.with_sampled(answer, 3)


def test_an_episode_goes_on_in_the_stream_that_it_is_called_in() -> None:
    episode = an_episode()
    assert [stream.ids.tolist() for stream in episode.streams] == [[1, 2, 11, 9, 1, 4, 2, 11, 9], [1, 3, 11, 9]]
    assert (episode.number, episode.answered, episode.sampled_length) == (0, TurnEnd.STOP, 6)
    assert episode.generation.token_ids.tolist() == [11, 9, 11, 9, 11, 9]
    assert [stream.ids.tolist() for stream in episode.from_prompt().streams] == [[1, 2]]
    for number, ids in ((3, [1]), (-1, [1]), (0, [])):
        with pytest.raises(ValueError, match="and there are 2"):
            episode.called(Turn("", "", 0.0, False), ids, number)
    with pytest.raises(ValueError, match=r"its streams have the numbers \[0, 2\]"):
        replace(episode, number=2, aside=((0, episode.stream),))


def test_a_sample_of_two_streams_is_shown_with_them() -> None:
    ended = an_episode().ended(Turn("11 9", "", 1.0, True), Finish.ENVIRONMENT)
    group = Group(0, 3, (ended,), results=(RewardResult(1.0),))
    step = Step(number=1, weight_version=3, advantages=np.array([0.5], np.float32))
    step.take(group, Decision.TRAINED, Prompt("s/0", "s", "the row", (5, 6), "x", RewardSpec(name="match")))
    ((row,),) = step.samples()
    assert row["prompt"] == "hello"
    assert [(turn["stream"], turn["tokens"]) for turn in row["turns"]] == [(0, 2), (1, 2), (0, 2)]
    assert sum(span["tokens"] for span in row["spans"]) == row["response_tokens"] == 6
    assert "(2 tokens of stream 1, reward 0.0000)" in sample_text(row)
    assert step.learned_lengths() == [6]
    assert len(step.trained_streams()) == 2
    metrics = episode_metrics([group])
    assert (metrics["rollout/episodes/streams/mean"], metrics["rollout/episodes/streams/max"]) == (2.0, 2.0)
    assert metrics["rollout/episodes/observed_tokens"] == 3.0


def test_a_failure_of_an_agent_is_told_with_its_stream() -> None:
    failure = EnvironmentFailure(FailureKind.DATA, "it broke")
    made = AgentLoop(Random(0), Budget(8, 4, 200))
    made.begin([3])
    (group,) = made.groups.groups
    episode = replace(an_episode(), ordinal=group.ordinal, sample=0)
    live = made.growth.turns._live.of(made.groups, group.ordinal, 0)
    assert live is not None
    live.action = "11 9"
    ended = made.growth.turns._after(live, episode, failure)
    assert ended is not None
    assert (ended.turns[-1].error, ended.turns[-1].stream) == ("it broke", 0)
