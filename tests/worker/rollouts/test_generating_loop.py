"""The generating loop over engines that answer in any order: what each is asked for, and when groups are scored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_run_folder import job

from rljob_api.spec import RewardSpec
from rljob_worker.errors import JobError, ProcessDiedError, StopRequested
from rljob_worker.flow import Group
from rljob_worker.flow.pool import OpenGroups
from rljob_worker.rollouts import growth as loop
from rljob_worker.rollouts.batch import training_sampling
from rljob_worker.rollouts.generator import Generator
from rljob_worker.rollouts.growth import Growth
from rljob_worker.rollouts.policies.base import Assignment
from rljob_worker.rollouts.policies.whole import in_shares
from rljob_worker.types import Cut, Generation, GenerationRequest, Prompt, RewardResult

SPEC = job(rollout={"promptsPerStep": 3, "samplesPerPrompt": 2, "maxResponseTokens": 8, "maxNumSeqs": 4}).spec
Choose = Callable[[Sequence[int], str], int]


class Engines:
    """Engines whose responses a test lets come; they answer a request with its seed.

    Args:
        count: how many.
        choose: one of some numbers.
    """

    def __init__(self, count: int, choose: Choose) -> None:
        self.processes = [SimpleNamespace(name=f"engine-{index}") for index in range(count)]
        self.asked: list[list[GenerationRequest]] = [[] for _ in range(count)]
        """All that each was asked for."""
        self.cuts: Sequence[Cut] | None = None
        self.dies: int | None = None
        self.left_out: list[str] = []
        self._answered = [0] * count
        self._choose, self._more = choose, False

    def __iter__(self) -> Iterator[Any]:
        return iter(self.processes)

    def __len__(self) -> int:
        return len(self.processes)

    def generate(self, shares: Any, sampling: Any, version: int, *, more: bool = False, cuts: Any = None) -> list[int]:
        self.asked, self._more, self.cuts = [list(share) for share in shares], more, cuts
        return list(range(len(shares)))

    def submit(self, engine: str, requests: list[GenerationRequest], *, last: bool) -> list[Any]:
        assert self._more, "the generation was closed"
        self.asked[int(engine.removeprefix("engine-"))] += requests
        self._more = not last
        return []

    def on_loss(self, error: ProcessDiedError) -> None:
        self.left_out.append(error.process)

    def running(self, engine: int) -> int:
        """Requests that an engine did not answer."""
        return len(self.asked[engine]) - self._answered[engine]

    # --- as of PhaseCalls --------------------------------------------------------------------

    def stream(self, otherwise: str, streams: list[int], *, each: bool, lost: Any) -> Iterator[tuple[int, Any]]:
        if self.dies is not None:
            lost(ProcessDiedError("gone", process=f"engine-{self.dies}"))
            self._answered[self.dies] = len(self.asked[self.dies])
        while busy := [engine for engine in streams if self.running(engine)]:
            engine = self._choose(busy, "engine")
            first = self._answered[engine]
            count = self._choose(range(1, self.running(engine) + 1), "count")
            self._answered[engine] += count
            yield engine, [(index, answer(self.asked[engine][index])) for index in range(first, first + count)]

    def gather(self, otherwise: str, calls: list[Any]) -> list[Any]:
        return calls

    def phase(self, otherwise: str) -> str:
        return otherwise

    def deadline(self, phase: str) -> float:
        return 60.0


def answer(request: GenerationRequest) -> Generation:
    return Generation(np.array([request.seed]), np.array([-0.5], np.float32), "stop")


class Rewards:
    """Rewards that are there at once; the sum of a response's tokens."""

    def __init__(self) -> None:
        self.submitted: list[list[Any]] = []
        self.outstanding = 0

    def submit(self, samples: list[Any]) -> None:
        self.submitted.append(samples)

    def take_all(self, deadline: float) -> list[tuple[Any, RewardResult]]:
        found = [(one, RewardResult(float(one.text))) for group in reversed(self.submitted) for one in reversed(group)]
        self.submitted = []
        return found


@pytest.fixture(autouse=True)
def _texts(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = lambda _, generations: [str(one.token_ids.sum()) for one in generations]  # noqa: E731
    monkeypatch.setattr(loop, "decode_responses", decode)


class Loop:
    """The loop over `count` groups."""

    def __init__(self, engines: Engines, count: int, samples: int = 2) -> None:
        fakes: Any = engines
        self.generator = Generator(SPEC, fakes, fakes)
        self.rewards, self.stop = Rewards(), threading.Event()
        inputs: Any = SimpleNamespace(tokenizer=None, rewards=self.rewards)
        self.growth = Growth(self.generator, fakes, inputs, self.stop)
        self.groups = OpenGroups()
        for ordinal in range(count):
            prompt = Prompt(f"p{ordinal}", "s", "", (1, 2), None, RewardSpec(name="match"))
            self.groups.put(prompt, Group.begun(ordinal, prompt, samples, 10 * ordinal, 0))

    def grow(self, assignment: Assignment, lost: list[str] | None = None) -> None:
        occupancy = self.generator.occupancy()
        self.growth.grow(self.groups, assignment, training_sampling(SPEC), 3, occupancy, lost=lost)

    def whole(self, *, when_free: bool = False) -> None:
        self.grow(in_shares(self.groups.groups, self.generator.fleet, when_free=when_free))


def chosen(data: st.DataObject) -> Choose:
    return lambda numbers, label: data.draw(st.sampled_from(numbers), label)


def first(numbers: Sequence[int], label: str) -> int:
    return numbers[0]


@given(st.data(), st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_each_sample_is_asked_for_once_and_each_group_scored_once_it_is_complete(
    data: st.DataObject, count: int, engines: int, when_free: bool
) -> None:
    fakes = Engines(engines, chosen(data))
    made = Loop(fakes, count)
    made.whole(when_free=when_free)
    seeds = [request.seed for part in fakes.asked for request in part]
    assert sorted(seeds) == sorted(10 * ordinal + sample for ordinal in range(count) for sample in (0, 1))
    assert {request.seed // 10 for part in fakes.asked for request in part} == set(range(count))
    for part in fakes.asked:
        held = [request.group for request in part]
        assert held[::2] == held[1::2], "a group is on one engine"
    assert sorted(group[0].ordinal for group in made.rewards.submitted) == list(range(count))
    made.growth.collect(made.groups)
    assert [[result.score for result in one.results] for one in made.groups.groups] == [
        [10.0 * ordinal, 10.0 * ordinal + 1] for ordinal in range(count)
    ]
    assert all(episode.stream.newest_version == 3 for one in made.groups.groups for episode in one.episodes)
    assert made.generator.loads() == {process.name: 0 for process in fakes.processes}
    assert made.generator.longest == {f"p{ordinal}": 1 for ordinal in range(count)}


@given(st.data(), st.integers(5, 30), st.integers(1, 3))
def test_engines_that_are_free_take_the_next_groups(data: st.DataObject, count: int, engines: int) -> None:
    fakes = Engines(engines, chosen(data))
    made = Loop(fakes, count)
    assignment = in_shares(made.groups.groups, made.generator.fleet, when_free=True)
    made.grow(assignment)
    for share, part in zip(assignment.held, fakes.asked):
        assert [request.group for request in part[: 2 * len(share) : 2]] == list(share)
    given_later = {
        request.group for share, part in zip(assignment.held, fakes.asked) for request in part[2 * len(share) :]
    }
    assert given_later == set(assignment.waiting)
    for share, part in zip(assignment.held, fakes.asked):
        later = [assignment.waiting.index(request.group) for request in part[2 * len(share) :: 2]]
        assert later == sorted(later), "in their order"


def test_what_is_cut_goes_on_from_where_it_was() -> None:
    fakes = Engines(1, first)
    made = Loop(fakes, 2)
    cut = Generation(np.array([7]), np.array([-0.1], np.float32), "")
    made.groups.extend(0, {1: cut}, 2)
    cuts = [Cut(())]
    made.grow(Assignment([[0]], cuts))
    assert [(request.seed, request.sampled_token_ids) for request in fakes.asked[0]] == [(0, ()), (1, (7,))]
    assert fakes.cuts is cuts
    assert [one.text for one in made.rewards.submitted[0]] == ["0", "8"], "the whole response"
    assert made.groups[0].episodes[1].stream.tokens_by_version() == {2: 1, 3: 1}
    assert not made.groups[1].complete


def test_nothing_is_asked_for_where_nothing_is_missing() -> None:
    fakes = Engines(1, lambda *_: pytest.fail("asked"))
    made = Loop(fakes, 1)
    made.grow(Assignment([()]))
    assert fakes.asked == [[]]


def test_responses_that_do_not_come_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Engines(2, first)
    made = Loop(fakes, 3)
    monkeypatch.setattr(fakes, "stream", lambda *_, **__: iter([(0, [(0, answer(GenerationRequest((1,), 0)))])]))
    with pytest.raises(JobError, match="eval: the engines returned 1 of 6 responses"):
        made.whole()


def test_what_a_lost_engine_had_is_missing_where_the_others_go_on() -> None:
    fakes = Engines(2, first)
    fakes.dies = 1
    made, lost = Loop(fakes, 4), list[str]()
    made.grow(in_shares(made.groups.groups, made.generator.fleet, when_free=False), lost)
    assert lost == fakes.left_out == ["engine-1"]
    assert [one.complete for one in made.groups.groups] == [True, True, False, False]
    assert made.generator.loads() == {"engine-0": 0, "engine-1": 0}
    with pytest.raises(ProcessDiedError):
        made.whole()


def test_rewards_that_a_stop_may_have_ended_are_nobodys() -> None:
    made = Loop(Engines(1, first), 2)
    made.whole()
    made.stop.set()
    with pytest.raises(StopRequested):
        made.growth.collect(made.groups)
    assert not any(one.results for one in made.groups.groups)
