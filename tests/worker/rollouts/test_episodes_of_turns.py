"""Episodes of several turns in the generating loop: engines and environments that answer in any order and fail."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.spec import Pace, RewardSpec
from rljob_worker.cli.samples import sample_text
from rljob_worker.driver.replay import asked_spans
from rljob_worker.environments.base import Answer, Began, EnvironmentFailure, FailureKind, Stepped
from rljob_worker.environments.hosts import Counts
from rljob_worker.errors import JobError
from rljob_worker.flow import Decision, Finish, Group, SpanKind
from rljob_worker.flow.pool import OpenGroups
from rljob_worker.flow.turns import Budget, Turn, total_reward
from rljob_worker.rollouts import growth as loop
from rljob_worker.rollouts.batch import episode_metrics, train_batch
from rljob_worker.rollouts.growth import Growth
from rljob_worker.rollouts.policies.base import Assignment, Fleet
from rljob_worker.rollouts.step import Step
from rljob_worker.rollouts.times import EnvironmentTimes
from rljob_worker.rollouts.turns import Beginning
from rljob_worker.rollouts.world import World
from rljob_worker.types import Generation, GenerationRequest, Prompt, RewardResult, SamplingParams

CLOSE = 9
"""The token that ends an answer."""
PLACE = "spec.data"


class Observations:
    """A token for each character, between two that open and close."""

    def first(self, observation: str) -> tuple[int, ...]:
        return (1, *map(ord, observation), 2)

    def after(self, ended_by: int | None, observation: str, parts: Sequence[str] = ()) -> tuple[int, ...]:
        return (*(() if ended_by == CLOSE else (CLOSE,)), 1, *map(ord, observation), 2)


class Hosts:
    """Environments that count their steps; some end, and some fail in a kind that the seed says.

    Args:
        rng: decides what comes when.
        fails: by seed, at which step and how.
    """

    deterministic = True

    def __init__(self, rng: Random, fails: Mapping[int, tuple[int, FailureKind, int]] | None = None) -> None:
        self._rng, self._fails = rng, dict(fails or {})
        self.slow, self.waited = False, 0
        self.lost_after = -1
        """Messages to and from their process after which it ends; -1: it does not."""
        self.open: dict[int, tuple[int, list[str]]] = {}
        self._answers: dict[int, Answer] = {}
        self.begun: Counter[int] = Counter()
        self.replayed: list[tuple[Sequence[Any], Sequence[str]]] = []

    def begin(
        self, key: int, seed: int, options: Any, answers: Sequence[Any] = (), actions: Sequence[str] = ()
    ) -> None:
        assert key not in self.open
        self.open[key] = seed, list(actions)
        self.begun[seed] += 1
        if answers:
            self.replayed.append((answers, actions))
        else:
            self._answer(key, Began(observed(seed, 0), {"n": 0.0}))

    def step(self, key: int, action: str, cut: bool = False) -> None:
        seed, actions = self.open[key]
        actions.append(action)
        self._answer(key, step_of(seed, len(actions)))

    def _answer(self, key: int, answer: Answer) -> None:
        seed, actions = self.open[key]
        at, kind, times = self._fails.get(seed, (-1, FailureKind.DATA, 0))
        if at == len(actions) and times:
            self._fails[seed] = at, kind, times - 1
            answer = EnvironmentFailure(kind, f"seed {seed} fails")
            del self.open[key]
        self._answers[key] = answer

    def lose(self) -> None:
        """Their process ends, and none of them can be made anew."""
        failed = EnvironmentFailure(FailureKind.INFRA, "lost")
        self._answers |= dict.fromkeys(self.open, failed)
        self.open.clear()
        self.lost_after = -1

    def holds(self, key: int) -> bool:
        return key in self.open

    def send(self) -> None:
        if self.lost_after == 0:
            self.lose()
        elif self.lost_after > 0:
            self.lost_after -= 1

    def take_counts(self) -> Counts:
        return Counts()

    def end(self, key: int) -> None:
        self.open.pop(key, None)
        self._answers.pop(key, None)

    @property
    def outstanding(self) -> int:
        return len(self._answers)

    def take(self, patience: float) -> list[tuple[int, Answer]]:
        self.send()
        if self.slow:
            self.waited += 1
            assert self.waited < 50, "nobody waits so long"
        if not self._answers or self.slow:
            return []
        keys = self._rng.sample(sorted(self._answers), k=self._rng.randint(1, len(self._answers)))
        return [(key, self._answers.pop(key)) for key in keys]


def observed(seed: int, step: int) -> str:
    return "ab"[: Random(f"{seed}/{step}").randrange(3)]


def step_of(seed: int, step: int) -> Stepped:
    done = Random(f"{seed} {step}").random() < 0.25
    return Stepped(observed(seed, step), float(step), done, False, {"n": float(step)})


class Engines:
    """Answers are what a request's noise and place say, so that it does not matter when they come."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.processes = [SimpleNamespace(name=f"engine-{index}") for index in range(2)]
        self.asked: list[list[GenerationRequest]] = []
        self.harvested_after: int | None = None

    def responses(self, shares: Any, sampling: Any, version: int, occupancy: Any, **_: Any) -> Any:
        asked = [one for share in shares for one in share]
        self.asked.append([request for _, request in asked])
        self._rng.shuffle(asked)
        while asked:
            count = self._rng.randint(1, len(asked))
            chunk, asked = asked[:count], asked[count:]
            yield [(key, self._answer(request)) for key, request in chunk]

    def going_on(self, shares: Any, sampling: Any, version: int, occupancy: Any, *, more: Any, **_: Any) -> Any:
        asked = [list(share) for share in shares]
        self.asked.append([request for share in asked for _, request in share])
        closed = False
        while not closed or any(asked):
            wanted = None if closed else more([len(share) for share in asked])
            closed = wanted is None
            for engine, requests in (wanted or {}).items():
                asked[engine] += requests
                self.asked.append([request for _, request in requests])
            chunk = []
            for share in asked:
                self._rng.shuffle(share)
                count = self._rng.randint(0, len(share))
                chunk += [share.pop() for _ in range(count)]
            yield [(key, self._answer(request)) for key, request in chunk]

    def _answer(self, request: GenerationRequest) -> Generation:
        whole = answer_of(request)
        left = whole.token_ids[len(request.sampled_token_ids) :]
        if self.harvested_after is not None:
            left = left[: self.harvested_after]
            if len(left) + len(request.sampled_token_ids) < len(whole.token_ids):
                return Generation(left, np.full(len(left), -0.5, np.float32), "")
        return Generation(left, np.full(len(left), -0.5, np.float32), whole.finish_reason)


def answer_of(request: GenerationRequest) -> Generation:
    rng = Random(f"{request.seed} {len(request.prompt_token_ids)}")
    ids = [rng.randrange(10, 20) for _ in range(rng.randrange(4))] + [CLOSE]
    assert request.max_tokens is not None
    reason = "stop" if len(ids) <= request.max_tokens else "length"
    return Generation(np.array(ids[: request.max_tokens]), np.full(len(ids), -0.5, np.float32), reason)


class Loop:
    """The loop over groups of two samples."""

    def __init__(
        self, rng: Random, budget: Budget, fails: Any = None, pace: Pace = Pace.TOGETHER, **world: Any
    ) -> None:
        self.hosts, self.engines = Hosts(rng, fails), Engines(rng)
        self.all_held = pace is Pace.TOGETHER
        self.budget, self.waited, self.submitted = budget, list[str](), list[list[Any]]()
        calls: Any = SimpleNamespace(attribute=lambda name, of, seconds: self.waited.append(name))
        rewards = SimpleNamespace(submit=self.submitted.append, outstanding=0)
        inputs: Any = SimpleNamespace(tokenizer=None, rewards=rewards)
        generator: Any = SimpleNamespace(
            responses=self.engines.responses,
            going_on=self.engines.going_on,
            fleet=Fleet(2, 3),
            longest={},
        )
        fakes: Any = self.hosts, Observations()
        worlds = {PLACE: World(*fakes, budget, **world)}
        self.growth = Growth(generator, calls, inputs, threading.Event(), worlds, pace)
        self.groups = OpenGroups()

    def begin(self, seeds: Sequence[int], first: int = 0) -> None:
        prompts = [
            Prompt(f"s/{seed}", "s", "", (), None, RewardSpec(name="match"), environment=PLACE, seed=seed)
            for seed in seeds
        ]
        wanted = [Beginning(place, prompt, 100 * place) for place, prompt in enumerate(prompts, start=first)]
        self.growth.begin(self.groups, wanted, 2, 0)

    def whole(self, seeds: Sequence[int]) -> None:
        self.begin(seeds)
        self.grow()

    def grow(self, version: int = 3, paused: Callable[[], bool] = lambda: False) -> None:
        ordinals = [one.ordinal for one in self.groups.groups if not one.complete]
        occupancy: Any = None
        # Some wait until an engine has room.
        held, waiting = (ordinals, []) if self.all_held else (ordinals[:2], ordinals[2:])
        assignment = Assignment([held[::2], held[1::2]], waiting=waiting)
        self.growth.grow(self.groups, assignment, SamplingParams(8), version, occupancy, paused=paused)

    def check_errors(self) -> None:
        self.growth.turns.check_errors((self.groups.prompt(one.ordinal), one) for one in self.groups.groups)


@pytest.fixture(autouse=True)
def _texts(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = lambda _, generations: [" ".join(map(str, one.token_ids)) for one in generations]  # noqa: E731
    monkeypatch.setattr(loop, "decode_responses", decode)


def model(seed: int, noise: int, budget: Budget) -> tuple[list[int], list[bool], list[Turn], Finish]:
    """The expected episode: its tokens, which of them were sampled, its turns and its end."""
    tokens, turns = list(Observations().first(observed(seed, 0))), list[Turn]()
    sampled = [False] * len(tokens)
    while True:
        most = budget.next(len(tokens), len(turns))
        if isinstance(most, Finish):
            return tokens, sampled, turns, most
        said = answer_of(GenerationRequest(tuple(tokens), noise, max_tokens=most)).token_ids.tolist()
        tokens += said
        sampled += [True] * len(said)
        step = step_of(seed, len(turns) + 1)
        turns.append(Turn(" ".join(map(str, said)), step.observation, step.reward, step.done, step.values))
        if step.done:
            return tokens, sampled, turns, Finish.ENVIRONMENT
        if len(turns) == budget.max_turns:
            return tokens, sampled, turns, Finish.TURNS
        after = Observations().after(said[-1], step.observation)
        if len(tokens) + len(after) >= budget.max_tokens:
            return tokens, sampled, turns, Finish.LENGTH
        tokens += after
        sampled += [False] * len(after)


paces = st.sampled_from(Pace)
budgets = st.builds(Budget, st.integers(1, 5), st.integers(1, 5), st.integers(5, 40))


@settings(max_examples=200)
@given(budgets, st.integers(0, 10**6), st.integers(1, 5), paces)
def test_random_episodes_are_what_their_noise_and_seeds_say(budget: Budget, start: int, count: int, pace: Pace) -> None:
    """1,000 and more: in whatever order engines and environments answer."""
    made = Loop(Random(start), budget, pace=pace)
    made.begin(range(start, start + count))
    made.grow()
    ends = Counter(episode.finish for group in made.groups.groups for episode in group.episodes)
    assert None not in ends
    for group in made.groups.groups:
        for episode in group.episodes:
            ids, sampled, turns, finish = model(start + group.ordinal, 100 * group.ordinal + episode.sample, budget)
            assert (episode.stream.ids.tolist(), episode.stream.sampled.tolist()) == (ids, sampled)
            assert (list(episode.turns), episode.finish, episode.text) == (turns, finish, turns[-1].action)
            assert len(episode.stream) <= budget.max_tokens
            assert episode.stream.spans[-1].kind is SpanKind.SAMPLED
            assert episode.sampled_length == sum(sampled) == len(episode.generation.token_ids)
        assert group.lengths == [episode.sampled_length for episode in group.episodes]
        assert Group.from_json(json.loads(json.dumps(group.as_json()))) == replace(group, prompt_uid="")
    assert sorted(samples[0].ordinal for samples in made.submitted) == list(range(count)), "scored once each"
    assert not made.hosts.open, "no environment is left"
    assert set(made.waited) == {"env_wait"}
    trained = [replace(one, results=()) for one in made.groups.groups]
    batch = train_batch(trained, np.arange(2.0 * count, dtype=np.float32))
    assert batch.sampled.tolist() == [flag for one in trained for e in one.episodes for flag in e.stream.sampled]
    assert len(batch.advantages) == batch.sampled.sum() == sum(map(sum, (one.lengths for one in trained)))


@settings(max_examples=100)
@given(budgets, st.integers(0, 10**6), st.integers(0, 3), paces)
def test_episodes_that_were_cut_go_on_elsewhere_to_the_same_tokens(
    budget: Budget, start: int, after: int, pace: Pace
) -> None:
    """Streams are read from JSON without an environment, as after an update of the weights or by a new driver."""
    made, whole = Loop(Random(start), budget, pace=pace), Loop(Random(start + 1), budget)
    for one in (made, whole):
        one.begin([start, start + 1, start + 2])
    whole.grow()
    made.engines.harvested_after = after
    made.grow(version=2)
    again = Loop(Random(start), budget, pace=pace)
    for group in made.groups.groups:
        kept = Group.from_json(json.loads(json.dumps(group.as_json())))
        again.groups.put(made.groups.prompt(group.ordinal), replace(kept, prompt_uid=group.prompt_uid))
    again.grow()
    for one, other in zip(again.groups.groups, whole.groups.groups):
        assert [e.stream.ids.tolist() for e in one.episodes] == [e.stream.ids.tolist() for e in other.episodes]
        assert [e.turns for e in one.episodes] == [e.turns for e in other.episodes]
    for answers, actions in again.hosts.replayed:
        assert len(answers) == len(actions) + 1
    assert not again.hosts.open


def pauses(rng: Random) -> Callable[[], bool]:
    """True for good from some time on, as an update of the weights that engines stand still for."""
    left = [rng.randrange(12)]

    def paused() -> bool:
        left[0] -= 1
        return left[0] < 0

    return paused


def taken(made: Loop) -> list[tuple[list[int], tuple[Turn, ...], Finish | None]]:
    return [(e.stream.ids.tolist(), e.turns, e.finish) for one in made.groups.groups for e in one.episodes]


@settings(max_examples=200)
@given(budgets, st.integers(0, 10**6), st.integers(0, 3), paces)
def test_episodes_go_on_over_updates_beside_new_ones(budget: Budget, start: int, cut: int, pace: Pace) -> None:
    """Engines are harvested at any instant, environments not waited for, and others begin and are evaluated between."""
    rng = Random(start)
    made, whole = Loop(rng, budget, pace=pace), Loop(Random(start + 1), budget)
    whole.whole(range(start, start + 6))
    made.begin([start, start + 1])
    for version in range(9):
        made.engines.harvested_after = cut if rng.random() < 0.5 else None
        made.grow(version, pauses(rng))
        if version in (1, 3):
            # What is asked for stays asked for while groups of an evaluation are played.
            held_out, training, made.groups = (1, 3), made.groups, OpenGroups()
            made.engines.harvested_after = None
            made.whole([start + 100 + n for n in held_out])
            assert all(one.complete for one in made.groups.groups)
            made.growth.turns.forget(made.groups)
            made.groups = training
            made.begin(range(start + version + 1, start + version + 3), version + 1)
    made.engines.harvested_after = None
    made.grow(9)
    assert taken(made) == taken(whole)
    for episode in (one for group in made.groups.groups for one in group.episodes):
        versions = [span.version for span in episode.stream.spans if span.version is not None]
        assert versions == sorted(versions)
    assert not made.hosts.open
    begun = {made.hosts.begun[start + ordinal] for ordinal in range(6)}
    assert begun == {2}, "one for each sample, also of those that were left alone"


def test_what_an_environment_says_to_dropped_samples_is_not_used() -> None:
    """Groups that became too old while their environments were asked are sampled again from their prompts."""
    seed = next(n for n in range(100) if not any(step_of(n, step).done for step in (1, 2, 3)))
    whole = Loop(Random(0), Budget(3, 4, 200))
    whole.whole([seed])
    for turns in range(3):
        made = Loop(Random(turns), Budget(3, 4, 200))
        made.begin([seed])
        for version in range(turns + 1):
            made.grow(version, lambda made=made, rounds=version + 1: len(made.engines.asked) >= rounds)
        assert all(one.answered is not None for one in made.groups[0].episodes)
        group = made.groups[0]
        made.groups.put(made.groups.prompt(0), group.sampled_again(7))
        made.grow(7)
        assert taken(made) == taken(whole)
        assert not made.hosts.open


@pytest.mark.parametrize("pace", Pace)
def test_an_update_does_not_wait_for_environments(pace: Pace) -> None:
    seed = next(n for n in range(100) if not step_of(n, 1).done)
    made = Loop(Random(0), Budget(2, 4, 200), pace=pace)
    made.begin([seed])
    made.hosts.slow = True
    made.grow(0, lambda: all(one.answered is not None for one in made.groups[0].episodes))
    assert made.growth.turns.outstanding(made.groups)
    assert all(one.answered is not None for one in made.groups[0].episodes)
    made.hosts.slow = False
    made.grow(1)
    assert made.groups[0].complete
    assert set(made.hosts.begun.values()) == {2}


def test_an_environment_that_raises_ends_its_episode_with_the_error_s_reward() -> None:
    seed = next(n for n in range(100) if not any(step_of(n, step).done for step in (1, 2, 3)))
    budget = Budget(3, 4, 200)
    made = Loop(Random(0), budget, {seed: (2, FailureKind.DATA, 1)}, error_reward=-1.0)
    made.begin([seed])
    made.grow()
    ends = sorted((one.finish.value, total_reward(one.turns)) for one in made.groups[0].episodes if one.finish)
    assert ends == [("failed", -1.0), ("turns", 6.0)]
    made = Loop(Random(0), budget, {seed: (2, FailureKind.DATA, 1)}, error_reward=None)
    made.begin([seed])
    with pytest.raises(JobError, match=f"seed {seed} fails"):
        made.grow()


def test_more_errors_than_the_share_fail_the_job() -> None:
    seeds = [n for n in range(100) if not step_of(n, 1).done][:4]
    fails = dict.fromkeys(seeds[:2], (1, FailureKind.DATA, 1))
    made = Loop(Random(0), Budget(2, 4, 200), fails, max_error_share=0.25)
    made.whole(seeds)
    made.check_errors()
    made = Loop(Random(0), Budget(2, 4, 200), fails, max_error_share=0.2)
    made.whole(seeds)
    with pytest.raises(
        JobError, match=r"spec.data.environment: 2 of 8 episodes .* spec.episodes.maxErrorShare 0.2; the first: seed"
    ):
        made.check_errors()


@pytest.mark.parametrize("pace", Pace)
@pytest.mark.parametrize("at", [0, 1])
def test_a_group_whose_environment_is_lost_is_given_back_whole(at: int, pace: Pace) -> None:
    seeds = [n for n in range(100) if not step_of(n, 1).done][:3]
    made = Loop(Random(1), Budget(2, 4, 200), {seeds[1]: (at, FailureKind.INFRA, 9)}, pace)
    for _ in range(2):
        made.begin(seeds)
        made.grow()
        assert made.growth.turns.take_given_back() == [1]
        assert 1 not in made.groups
        assert all(made.groups[ordinal].complete for ordinal in (0, 2))
        assert not made.hosts.open
    with pytest.raises(JobError, match=f"seed {seeds[1]} fails"):
        made.whole(seeds)


@settings(max_examples=200)
@given(budgets, st.integers(0, 10**6), st.integers(0, 3), paces)
def test_environments_that_are_lost_while_the_policy_answers_give_their_groups_back(
    budget: Budget, start: int, cut: int, pace: Pace
) -> None:
    """They fail without being asked for anything, as those of tools and agents do with their process."""
    rng = Random(start)
    made, whole = Loop(rng, budget, pace=pace), Loop(Random(start + 1), budget)
    made.hosts.deterministic = False
    whole.whole(range(start, start + 4))
    made.begin(range(start, start + 4))
    made.engines.harvested_after = cut
    made.hosts.lost_after = rng.randrange(12)
    made.grow(0, pauses(rng))
    if made.hosts.lost_after >= 0:
        made.hosts.lose()
    made.engines.harvested_after = None
    made.grow(1)
    given_back = made.growth.turns.take_given_back()
    assert len(set(given_back)) == len(given_back)
    assert all(one.complete for one in made.groups.groups)
    assert [one.ordinal for one in made.groups.groups] == [n for n in range(4) if n not in given_back]
    for ordinal in given_back:
        made.begin([start + ordinal], ordinal)
    made.grow(2)
    assert taken(made) == taken(whole)
    assert not made.hosts.open
    assert not made.hosts.outstanding


def test_an_environment_that_cannot_be_made_again_as_it_was_begins_anew_once() -> None:
    seed = next(n for n in range(100) if not any(step_of(n, step).done for step in (1, 2, 3)))
    for times, restarts in ((1, [0, 1]), (2, None)):
        made = Loop(Random(2), Budget(3, 4, 200), {seed: (2, FailureKind.REPLAY, times)})
        made.begin([seed])
        if restarts is None:
            made.hosts._fails[seed] = 2, FailureKind.REPLAY, 9
            with pytest.raises(JobError, match=f"seed {seed} fails"):
                made.grow()
            continue
        made.grow()
        assert sorted(one.restarts for one in made.groups[0].episodes) == restarts
        for episode in made.groups[0].episodes:
            assert episode.stream.ids.tolist() == model(seed, episode.sample, made.budget)[0]


def test_environments_that_do_not_repeat_themselves_begin_anew_where_they_are_gone() -> None:
    seed = next(n for n in range(100) if not any(step_of(n, step).done for step in (1, 2, 3)))
    made = Loop(Random(0), Budget(3, 4, 200))
    made.begin([seed])
    made.engines.harvested_after = 1
    made.grow()
    again = Loop(Random(0), Budget(3, 4, 200))
    again.hosts.deterministic = False
    again.groups.put(made.groups.prompt(0), made.groups[0])
    again.grow()
    begun_again = [one.restarts for one in again.groups[0].episodes]
    assert begun_again == [int(bool(one.turns)) for one in made.groups[0].episodes]
    assert not again.hosts.replayed or not any(actions for _, actions in again.hosts.replayed)


def test_an_observation_that_leaves_no_room_is_named() -> None:
    seed = next(n for n in range(100) if len(observed(n, 0)) == 2)
    made = Loop(Random(0), Budget(3, 4, 4))
    with pytest.raises(JobError, match=rf"seed {seed} has 4 tokens, .*: spec.episodes.maxTokens is 4"):
        made.begin([seed])


def test_a_budget_has_room_for_one_token() -> None:
    with pytest.raises(ValueError, match="at least one answer of one token"):
        Budget(1, 0, 5)
    budget = Budget(2, 3, 10)
    assert [budget.next(tokens, 1) for tokens in (1, 7, 8, 9, 10)] == [3, 3, 2, 1, Finish.LENGTH]
    assert budget.next(1, 2) is Finish.TURNS


def test_what_is_recorded_of_an_episode() -> None:
    seed = next(n for n in range(100) if step_of(n, 2).done and not step_of(n, 1).done)
    made = Loop(Random(3), Budget(3, 4, 200))
    made.whole([seed])
    group = replace(made.groups[0], results=(RewardResult(3.0), RewardResult(3.0)))
    step = Step(1, 3)
    step.take(group, Decision.TRAINED, made.groups.prompt(0))
    step.advantages = np.array([0.5, -0.5], np.float32)
    metrics = episode_metrics([group])
    assert metrics["rollout/episodes/turns/mean"] == metrics["rollout/episodes/turns/max"] == 2
    assert metrics["rollout/episodes/finish/environment"] == 1
    assert metrics["rollout/episodes/finish/failed"] == metrics["rollout/episodes/restarted"] == 0
    assert "rollout/episodes/success" not in metrics
    for row, episode in zip(step.samples()[0], group.episodes):
        assert row["prompt"] == observed(seed, 0)
        assert row["response"] == episode.turns[-1].action
        assert row["response_tokens"] == sum(turn["tokens"] for turn in row["turns"]) == episode.sampled_length
        assert [(turn["reward"], turn["done"], turn["error"]) for turn in row["turns"]] == [
            (1.0, False, None), (2.0, True, None)
        ]  # fmt: skip
        shown = sample_text(row)
        assert "turn 1 <" in shown
        assert "reward 2" in shown
        assert "response" not in shown
    alone = Prompt("p", "s", "", (1,), None, RewardSpec(name="match"))
    assert episode_metrics([Group.begun(0, alone, 1, 0, 0)]) == {}


def test_a_reward_sees_the_turns_and_the_policy_s_last_words() -> None:
    seed = next(n for n in range(100) if step_of(n, 2).done and not step_of(n, 1).done)
    made = Loop(Random(3), Budget(3, 4, 200))
    made.whole([seed])
    (samples,) = made.submitted
    for sample, episode in zip(samples, made.groups[0].episodes):
        assert (sample.turns, sample.text) == (episode.turns, episode.turns[-1].action)
        assert sample.prompt.text == observed(seed, 0)
        assert len(sample.generation.token_ids) == episode.sampled_length
        assert total_reward(sample.turns) == 3.0


def test_times_of_environments() -> None:
    times = EnvironmentTimes([1.0], [], Counter({FailureKind.DATA: 2}))
    times += EnvironmentTimes([3.0], [2.0], Counter({FailureKind.INFRA: 1, FailureKind.DATA: 1}))
    assert times.metrics() == {
        "perf/env_reset_time/mean": 2.0, "perf/env_reset_time/p99": pytest.approx(2.98), "perf/env_reset_time/max": 3.0,
        "perf/env_step_time/mean": 2.0, "perf/env_step_time/p99": 2.0, "perf/env_step_time/max": 2.0,
        "rollout/episodes/failures/infra": 1.0, "rollout/episodes/failures/data": 3.0,
        "rollout/episodes/failures/replay": 0.0,
    }  # fmt: skip
    none = EnvironmentTimes().metrics()
    assert none == dict.fromkeys(("rollout/episodes/failures/" + kind for kind in ("infra", "data", "replay")), 0.0)


@settings(max_examples=50)
@given(budgets, st.integers(0, 10**6))
def test_a_replay_asks_for_each_answer_after_what_was_before_it(budget: Budget, seed: int) -> None:
    made = Loop(Random(seed), budget)
    made.whole([seed])
    group, prompt = made.groups[0], made.groups.prompt(0)
    asked = asked_spans(group, prompt, 3)
    assert len(asked) == sum(len(one.turns) for one in group.episodes)
    for one in asked:
        again = answer_of(one.request)
        assert again.token_ids.tolist() == one.recorded[0].tolist()
    assert not asked_spans(group, prompt, 2)
