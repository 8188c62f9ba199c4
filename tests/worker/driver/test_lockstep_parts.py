"""Parts of mode Disaggregated, without processes: the engines' lane, and batches that are carried over."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_run_folder import job

from rljob_api import derived
from rljob_api.spec import RLJobSpec
from rljob_worker.cluster.calls import Calls
from rljob_worker.cluster.cluster import check_apart
from rljob_worker.cluster.groups import EngineGroup
from rljob_worker.cluster.placement import Placement
from rljob_worker.data.dataset import PromptSource
from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer
from rljob_worker.driver.loops.lane import EngineLane
from rljob_worker.environments.base import FailureKind
from rljob_worker.errors import JobError, StopRequested
from rljob_worker.flow import Group, GroupPool
from rljob_worker.phases import PhaseClock
from rljob_worker.rollouts.policies import policy_of
from rljob_worker.rollouts.rollouts import Rollouts
from rljob_worker.rollouts.step import Progress, Step
from rljob_worker.rollouts.times import EnvironmentTimes
from rljob_worker.types import Generation, RewardResult

# --- the engines' lane -------------------------------------------------------------------------


class Lane:
    """A lane whose work ends on request, or when it is given up."""

    def __init__(self) -> None:
        self.clock = PhaseClock()
        self.stop, self.given_up, self.go_on = threading.Event(), threading.Event(), threading.Event()
        self.lane = EngineLane(self.clock.lane("engine"), self.stop, self.given_up)

    def work(self) -> None:
        with self.lane.clock.phase("rollout"):
            while not self.go_on.wait(0.01):
                if self.given_up.is_set():
                    raise StopRequested


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane()
    yield made
    made.go_on.set()
    made.lane.close()


def test_the_engines_wait_for_leave_from_the_end_of_their_work_until_they_get_it(lane: Lane) -> None:
    lane.clock.restart()
    lane.lane.begin(lane.work)
    time.sleep(0.05)
    lane.go_on.set()
    lane.lane.finish()
    time.sleep(0.05)
    lane.lane.release()
    with lane.lane.clock.phase("update_weights"):
        time.sleep(0.01)
    timing = lane.clock.end_step()
    engine = timing.lanes["engine"]
    assert engine.keys() == {"rollout", "admission_wait", "update_weights"}
    assert engine["rollout"] >= 0.05
    assert engine["admission_wait"] >= 0.05
    assert sum(engine.values()) <= timing.step_seconds
    assert timing.bubble(engine) == pytest.approx(engine["admission_wait"] / timing.step_seconds)


def test_what_the_work_raises_is_raised_where_it_is_waited_for_and_where_trainers_are(lane: Lane) -> None:
    def fail() -> None:
        raise JobError("rollout: engine-0 died")

    lane.lane.begin(fail)
    with pytest.raises(JobError, match="engine-0 died"):
        lane.lane.finish()
    with pytest.raises(JobError, match="engine-0 died"):
        lane.lane.check()
    lane.lane.close()
    lane.lane.check()


def test_a_stop_gives_the_work_up_at_once_or_when_the_patience_is_over(lane: Lane) -> None:
    lane.lane.begin(lane.work)
    lane.stop.set()
    begun = time.monotonic()
    with pytest.raises(StopRequested):
        lane.lane.finish(patience=0.3)
    assert time.monotonic() - begun >= 0.3
    lane.lane.check()


def test_a_stop_waits_for_work_that_ends_within_the_patience(lane: Lane) -> None:
    lane.lane.begin(lane.work)
    lane.stop.set()
    threading.Timer(0.1, lane.go_on.set).start()
    lane.lane.finish(patience=30)
    assert not lane.given_up.is_set()


def test_closing_ends_what_is_under_way_and_is_harmless_twice(lane: Lane) -> None:
    lane.lane.begin(lane.work)
    lane.lane.close()
    lane.lane.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "engine-lane"]


@given(st.lists(st.sampled_from(["work", "idle", "wait"]), max_size=12))
def test_any_order_of_steps_leaves_no_thread_and_no_open_phase(steps: list[str]) -> None:
    made = Lane()
    made.go_on.set()
    for what in steps:
        if what == "work":
            made.lane.begin(made.work)
        elif what == "idle":
            made.lane.idle()
        if what != "wait":
            made.lane.finish()
        if what == "wait":
            made.lane.release()
            assert made.lane.clock.current is None
    made.lane.close()
    assert made.lane.clock.current is None
    timing = made.clock.end_step()
    assert sum(timing.lanes["engine"].values()) <= timing.step_seconds


def test_a_wait_for_trainers_ends_by_what_happened_in_the_other_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_wait: Callable[..., Any] = lambda refs, **_: time.sleep(0.01) or ([], list(refs))  # noqa: E731
    monkeypatch.setattr("rljob_worker.cluster.calls.ray.wait", ray_wait)
    failed = threading.Event()

    def watch() -> None:
        if failed.is_set():
            raise JobError("rollout: engine-0 died")

    given_up = threading.Event()
    first = Calls(threading.Event(), lambda: pytest.fail("interrupted"), str, lambda what: pytest.fail(what))
    calls = first.beside(given_up, lambda: pytest.fail("interrupted"), watch)
    assert calls.busy is first.busy
    threading.Timer(0.1, failed.set).start()
    with pytest.raises(JobError, match="engine-0 died"):
        calls.gather("actor_train", [SimpleNamespace(ref=object(), process="trainer-0")], 30.0, stoppable=True)  # type: ignore[list-item]


# --- a batch that is carried over --------------------------------------------------------------


class Made:
    """Rollouts over a pool of real data; nothing is generated."""

    def __init__(self, spec: RLJobSpec, tokenizer: Any, worlds: dict[str, Any]) -> None:
        self.pool = GroupPool(PromptSource(spec, tokenizer))
        self.progress = Progress()
        inputs: Any = SimpleNamespace(
            tokenizer=tokenizer, evaluation_prompts=[], worlds=worlds, group_filter=None, pictures=None
        )
        nothing: Any = None
        self.rollouts = Rollouts(
            spec, policy_of(spec), EngineGroup(), nothing, self.pool, inputs, self.progress, threading.Event()
        )

    def batch(self, version: int, chance: random.Random) -> list[Group]:
        """Groups that `generate` and `collect_rewards` would leave in the pool, by weights of `version`."""
        for ordinal, prompt in self.pool.draw(3):
            parts = [
                Generation(
                    np.array([chance.randrange(3, 9) for _ in range(length)], np.int64),
                    np.array([-chance.random() for _ in range(length)], np.float32),
                    chance.choice(["stop", "length"]),
                )
                for length in (chance.randint(1, 4), chance.randint(1, 4))
            ]
            self.pool.put(prompt, Group.begun(ordinal, prompt, 2, 10 * ordinal, version))
            for sample, part in enumerate(parts):
                self.pool.extend(ordinal, {sample: part}, version)
            self.pool.scoring(ordinal)
            for sample in (0, 1):
                self.pool.score(ordinal, sample, RewardResult(chance.random(), {"a": chance.random()}))
        return self.pool.groups

    def close(self, step: Step) -> None:
        """Same as `Job.advance`."""
        self.pool.settle([group.ordinal for group in step.groups], [])
        self.progress.step += 1
        self.progress.weight_version += 1


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    path = tmp_path_factory.mktemp("data") / "names.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "label": "x"}) + "\n" for i in range(7)))
    model = {"random": {"config": {"model_type": "qwen3"}}}

    def spec(staleness: int = 1) -> RLJobSpec:
        rollout = {"promptsPerStep": 3, "samplesPerPrompt": 2, "maxResponseTokens": 4}
        rollout |= {"staleness": {"max": staleness}}
        data = {"path": str(path), "name": "ab"}
        return job(data=data, model=model, rollout=rollout, mode="Disaggregated", steps=40).spec

    tokenizer = load_tokenizer(prepare_tokenizer(spec(), path.parent / "tokenizer"))
    return lambda staleness=1, **worlds: Made(spec(staleness), tokenizer, worlds)


@pytest.mark.parametrize("seed", range(10))
def test_a_batch_made_ahead_is_trained_on_once_with_the_same_bits_over_any_restarts(
    make: Callable[..., Made], seed: int
) -> None:
    chance, seen, made = random.Random(seed), list[int](), make()
    expected: list[Group] | None = None
    while made.progress.step < 12:
        if chance.random() < 0.4:
            again = make()
            again.progress.step, again.progress.weight_version = made.progress.step, made.progress.weight_version
            cursor, stored = json.loads(
                json.dumps([made.pool.saved.cursor, [one.as_json() for one in made.pool.saved.groups]])
            )
            again.pool.restore(cursor, tuple(map(Group.from_json, stored)), whole=True)
            made = again
        step = made.rollouts.next_step()
        assert (step.number, step.weight_version) == (made.progress.step + 1, made.progress.weight_version)
        assert made.rollouts.select(step) is (expected is not None)
        if expected is None:
            expected = made.batch(made.progress.weight_version, chance)
            assert made.rollouts.select(step)
        assert [replace(group, decision=None) for group in step.groups] == expected
        assert all(episode.text is not None for group in step.groups for episode in group.episodes)
        seen += [group.ordinal for group in step.groups]
        ahead = made.rollouts.step_after(step)
        assert ahead is not None
        assert (ahead.number, ahead.weight_version) == (step.number + 1, step.weight_version + 1)
        expected = made.batch(made.progress.weight_version, chance)
        if chance.random() < 0.2:
            made.rollouts.drop_ahead()
            expected = None
        made.close(step)
    assert seen == sorted(set(seen)), "each prompt once, in order, those of a batch that was dropped too"
    assert seen == list(range(len(seen)))


def test_nothing_is_made_ahead_of_the_last_step_or_at_staleness_0(make: Callable[..., Made]) -> None:
    assert make().rollouts.step_after(Step(40, 39)) is None
    assert make().rollouts.step_after(Step(39, 38)) is not None
    assert make(staleness=0).rollouts.step_after(Step(1, 0)) is None


def test_a_batch_that_a_killed_driver_made_has_counts_of_failures(make: Callable[..., Made]) -> None:
    """Its step asks no environment: it has none of their times, and no failure."""
    made, alone = make(games=SimpleNamespace()), make()
    for one in (made, alone):
        _carried(one)
        one.progress.step = one.progress.weight_version = 1
    step = made.rollouts.next_step()
    assert made.rollouts.select(step)
    assert step.environments is not None
    assert step.environments.metrics() == {f"rollout/episodes/failures/{kind}": 0.0 for kind in FailureKind}
    ahead = made.rollouts.step_after(step)
    assert ahead is not None
    assert ahead.environments == EnvironmentTimes()
    assert alone.rollouts.next_step().environments is None


def _carried(made: Made) -> list[Group]:
    made.batch(0, random.Random(0))
    made.pool.settle([], [])
    return made.pool.groups


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda groups: groups[:2], "2 groups were carried over, not 3 complete ones"),
        (lambda groups: (*groups[:2], _unfinished(groups[2])), "not 3 complete ones"),
    ],
)
def test_what_is_no_batch_for_the_step_is_refused(make: Callable[..., Made], spoil: Any, message: str) -> None:
    made = make()
    made.pool.update(spoil(_carried(made)))
    made.progress.weight_version = 1
    with pytest.raises(JobError, match=message):
        made.rollouts.next_step()


def test_a_batch_that_is_older_than_the_bound_is_not_trained_on(make: Callable[..., Made]) -> None:
    made = make()
    _carried(made)
    made.progress.weight_version = 2
    with pytest.raises(JobError, match=r"2 updates before the 2 of step 1; spec.rollout.staleness.max is 1"):
        made.rollouts.next_step()


def _unfinished(one: Group) -> Group:
    first, *others = one.episodes
    return replace(one, episodes=(replace(first, finish=None), *others), results=())


# --- devices -----------------------------------------------------------------------------------


def _spec(mode: str, trainers: int, engine_devices: int, size: int) -> RLJobSpec:
    rollout = {"promptsPerStep": 60, "samplesPerPrompt": 2, "maxResponseTokens": 4, "tensorParallel": size}
    resources: dict[str, Any] = {"profile": "cpu", "devicesPerNode": trainers}
    if mode == "Disaggregated":
        groups = {"trainer": {"devicesPerNode": trainers}, "rollout": {"devicesPerNode": engine_devices}}
        resources = {"profile": "cpu", **groups}
    return job(mode=mode, rollout=rollout, resources=resources).spec


def _placement(spec: RLJobSpec) -> Placement:
    nothing: Any = None
    return Placement(nothing, (nothing,), derived.node_groups(spec))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_every_process_has_devices_of_its_own(trainers: int, engines: int, size: int) -> None:
    spec = _spec("Disaggregated", trainers, engines * size, size)
    placement = _placement(spec)
    assert len(placement.trainers(spec.training)) == trainers
    spanned = placement.engines(size)
    assert [len(engine) for engine in spanned] == [size] * engines
    used = [*placement.trainers(spec.training), *(device for engine in spanned for device in engine)]
    assert used == list(range(derived.devices_per_node(spec)))
    identities = [("node", f"cpu:{device}") for device in used]
    check_apart(identities[:trainers], identities[trainers:])
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(JobError, match="none is used twice"))
        check_apart(identities[:trainers], [*identities[trainers:-1], identities[0]])


@given(st.integers(1, 3), st.integers(1, 3))
def test_shared_devices_are_divided_as_before(engines: int, size: int) -> None:
    spec = _spec("Colocated", engines * size, 0, size)
    placement = _placement(spec)
    assert placement.trainers(spec.training) == list(range(engines * size))
    spanned = [list(engine) for engine in placement.engines(size)]
    assert spanned == [list(range(index * size, (index + 1) * size)) for index in range(engines)]
