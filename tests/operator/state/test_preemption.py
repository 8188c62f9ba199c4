"""Kueue's boost for a job's unsaved work: its value, when it is written, and when nothing is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from simulation import World, make_spec

from rljob_api.status import CheckpointStatus, Progress
from rljob_operator.state.observed import Observed, QueueView, WorkloadView
from rljob_operator.state.plan import AnnotateWorkload
from rljob_operator.state.preemption import MAX_BOOST, priority_boost
from rljob_operator.state.reconcile import reconcile
from rljob_operator.state.timing import seconds_of, time_text

Running = Callable[..., World]
KUEUE = {"scheduling": {"system": "Kueue", "queue": "rl"}}


def seen(
    world: World,
    workload: WorkloadView | None = None,
    *,
    admitted: bool = True,
    saved: float | None = None,
    boosts: bool = True,
    **changes: Any,
) -> Observed:
    """The job with its Workload, and a checkpoint of so many seconds ago."""
    observed = world.observed()
    spec = make_spec(**{**KUEUE, **changes})
    assert observed.driver is not None
    step = None if saved is None else 1
    status = observed.job.status
    progress = None
    if saved is not None:
        progress = Progress(last_checkpoint=CheckpointStatus(step=1, time=time_text(world.now - saved)))
    return replace(
        observed,
        job=replace(observed.job, spec=spec, status=status.model_copy(update={"progress": progress})),
        queue=QueueView(admitted, workload=workload or WorkloadView("w", "uid-w")),
        boosts_priority=boosts,
        driver=replace(observed.driver, last_checkpoint_step=step),
    )


def told(world: World, *arguments: Any, **named: Any) -> list[AnnotateWorkload]:
    plan = reconcile(seen(world, *arguments, **named), world.now)
    return [action for action in plan.actions if isinstance(action, AnnotateWorkload)]


@pytest.mark.parametrize(
    ("seconds", "boost"),
    [(0, 0), (59, 0), (60, 1), (119, 1), (120, 2), (60 * 2**8 - 1, 8), (60 * 2**8, 9), (1e15, MAX_BOOST)],
)
def test_a_boost_is_one_more_for_each_doubling(seconds: float, boost: int) -> None:
    assert priority_boost(seconds) == boost


def test_what_the_attempt_did_is_unsaved_until_the_first_checkpoint(running: Running) -> None:
    world = running(steps=400)
    began = world.status.attempts[-1].start_time
    assert began is not None
    world.pass_time(600)
    world.look()
    boost = priority_boost(world.now - seconds_of(began))
    assert boost == 4
    assert told(world) == [AnnotateWorkload("w", "uid-w", boost, "")]
    assert told(world, WorkloadView("w", "uid-w", str(boost))) == []


def test_a_checkpoint_takes_the_boost_back(running: Running) -> None:
    world = running()
    saved = time_text(world.now - 10)
    assert told(world, WorkloadView("w", "uid-w", "4"), saved=10) == [AnnotateWorkload("w", "uid-w", 0, saved)]


def test_a_checkpoint_of_an_earlier_attempt_saves_nothing_of_this_one(running: Running) -> None:
    world = running()
    world.pass_time(300)
    world.look()
    began = world.status.attempts[-1].start_time
    assert began is not None
    (note,) = told(world, saved=100_000)
    assert note.boost == priority_boost(world.now - seconds_of(began)) > 2


def test_the_checkpoint_alone_is_written_only_when_it_is_far_behind(running: Running) -> None:
    world = running()
    near, far = time_text(world.now - 200), time_text(world.now - 400)
    assert told(world, WorkloadView("w", "uid-w", "", near), saved=10) == []
    assert told(world, WorkloadView("w", "uid-w", "", far), saved=10)[0].last_checkpoint == time_text(world.now - 10)
    assert len(told(world, WorkloadView("w", "uid-w", "", "rubbish"), saved=10)) == 1
    assert len(told(world, WorkloadView("w", "uid-w", "", near))) == 1  # What was saved is gone, and so is its name.


def test_a_job_that_waits_has_no_boost(running: Running) -> None:
    world = running()
    assert told(world, WorkloadView("w", "uid-w", "7"), admitted=False) == [AnnotateWorkload("w", "uid-w", 0, "")]
    assert told(world, WorkloadView("w", "uid-w", "0"), admitted=False) == []
    assert told(world, admitted=False) == []


def test_nothing_is_written_where_nobody_asked_for_it(running: Running) -> None:
    world = running(steps=400)
    world.pass_time(600)
    world.look()
    assert len(told(world)) == 1
    assert told(world, boosts=False) == []
    assert told(world, scheduling={"system": "Volcano", "queue": "rl"}) == []
    volcano = replace(seen(world), queue=QueueView(True, object="PodGroup p"))
    assert not [one for one in reconcile(volcano, world.now).actions if isinstance(one, AnnotateWorkload)]


def test_a_job_that_has_ended_is_left_alone(running: Running) -> None:
    world = running()
    for _ in range(400):
        world.pass_time(5)
        world.look()
        if world.status.phase == "Succeeded":
            break
    assert world.status.phase == "Succeeded"
    observed = replace(world.observed(), queue=QueueView(True, workload=WorkloadView("w", "uid-w", "7")))
    observed = replace(observed, boosts_priority=True)
    assert not [one for one in reconcile(observed, world.now).actions if isinstance(one, AnnotateWorkload)]
