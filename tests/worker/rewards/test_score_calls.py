"""Rewards that come in bursts, and while others are taken: none is lost, and nobody waits for good."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from reward_cases import make_spec, samples_of

from rljob_worker.confined.access import files_of
from rljob_worker.confined.bounds import Bounds, environment
from rljob_worker.confined.process import Place
from rljob_worker.rewards.functions import RewardFailure
from rljob_worker.rewards.pool import WorkerPool
from rljob_worker.rewards.score_calls import RewardError, ScoreCall, ScoreCalls
from rljob_worker.rewards.weighted_parts import parts_of
from rljob_worker.rewards.worker import Setup
from rljob_worker.types import RewardResult

TASKS = 3000


class EndsWhenSeen(list[ScoreCall]):
    """The calls of a sample; before somebody looks at them for the n-th time, another thread says that they ended."""

    def __init__(self, call: ScoreCall, calls: ScoreCalls, visit: int) -> None:
        super().__init__([call])
        self._visits_left = visit
        self.ending = threading.Thread(
            target=calls.end, args=([(call, RewardResult(1.0))], calls.round), name="scoring", daemon=True
        )

    def __iter__(self) -> Iterator[ScoreCall]:
        self._visits_left -= 1
        if self._visits_left == 0:
            self.ending.start()
            self.ending.join(0.3)
        return super().__iter__()


@pytest.mark.parametrize("visit", range(1, 5))
def test_a_result_that_comes_while_others_are_taken_is_taken_then_or_next(visit: int) -> None:
    spec = make_spec({"name": "match"})
    (sample,) = samples_of(spec, ["a"])
    calls = ScoreCalls(lambda: None)
    [part] = parts_of(sample.prompt.reward)
    seen = EndsWhenSeen(ScoreCall(sample, part, time.monotonic()), calls, visit)
    calls.begin([seen])
    taken = [one for _ in range(4) for one in calls.take(0.01, 60.0)]
    seen.ending.join(60)
    taken += calls.take(0.01, 60.0)
    assert [result.score for _, result in taken] == [1.0]
    assert calls.outstanding == 0


def test_a_reward_that_is_taken_has_its_own_time() -> None:
    spec = make_spec({"name": "match"})
    given_up = list[bool]()
    calls = ScoreCalls(lambda: given_up.append(True))
    now = time.monotonic()
    for age, uid in ((20.0, "data/0"), (0.0, "data/1")):
        (sample,) = samples_of(spec, ["a"], uid)
        [part] = parts_of(sample.prompt.reward)
        calls.begin([[ScoreCall(sample, part, now - age)]])
    assert calls.take(0.01, 1000.0) == []
    assert (calls.outstanding, given_up) == (2, [])
    with pytest.raises(RewardError, match=r"1 of 2 rewards had not ended at the deadline, .* prompt data/0, sample 0"):
        calls.take(0.01, 15.0)
    assert given_up == [True]
    assert calls.take(0.01, 1000.0) == [], "what was submitted is forgotten"
    assert calls.outstanding == 0


def test_a_burst_of_more_tasks_than_the_pool_is_woken_for(tmp_path: Path) -> None:
    """A socket holds 278 wake-ups: a thread that waits for room in it must not hold what the pool waits for."""
    (tmp_path / "burst_reward.py").write_text("async def score(response):\n    return 1.0\n")
    setup = Setup(None, "burst_reward:score", False, {}, 20.0)
    variables = environment({}, {})
    files = files_of([tmp_path], [], [], [], variables)
    place = Place(tmp_path, variables, Bounds(2**31, files))
    pool = WorkerPool(setup, processes=1, in_flight=256, grace=2.0, place=place)
    sample = {"prompt": "a", "response": "b", "label": "c", "finish_reason": "stop", "metadata": {}}
    failures, ready, all_came = list[RewardFailure | None](), threading.Event(), threading.Event()

    def done(scores: object) -> None:
        failures.append(scores if isinstance(scores, RewardFailure) else None)
        ready.set()
        if len(failures) == TASKS:
            all_came.set()

    def submit(tasks: int) -> None:
        for _ in range(tasks):
            pool.submit([sample], done)

    submit(1)
    assert ready.wait(60)
    submitting = threading.Thread(target=submit, args=(TASKS - 1,), daemon=True)
    submitting.start()
    assert all_came.wait(30), f"{len(failures)} of {TASKS}"
    assert set(failures) == {None}
    pool.close()
