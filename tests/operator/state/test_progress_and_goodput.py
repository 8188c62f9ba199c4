"""The status of the training, and where the time went."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from simulation import World

from rljob_api.status import Goodput, JobPhase, RLJobStatus
from rljob_operator.state.explain import explain
from rljob_operator.state.goodput import settle, settled
from rljob_operator.state.observed import Observed, PodRole, PodView, StepView, SubmissionState
from rljob_operator.state.plan_builder import PlanBuilder
from rljob_operator.state.reconcile import reconcile
from rljob_operator.state.status_text import clean, reason_word, short_value
from rljob_operator.state.timing import duration_text, seconds_of, time_text

Running = Callable[..., World]


def with_driver(world: World, **fields: object) -> Observed:
    observed = world.observed()
    assert observed.driver is not None
    return replace(observed, driver=replace(observed.driver, **fields))


def test_progress_of_a_running_job(running: Running) -> None:
    world = running()
    world.run(75)
    progress = world.status.progress
    assert progress is not None
    assert progress.last_step is not None
    assert progress.last_checkpoint is not None
    assert (progress.step, progress.steps, progress.step_seconds) == (7, 40, 10)
    assert (progress.eta_seconds, progress.eta) == (330, "5m")
    assert (progress.reward_mean, progress.weight_version) == (0.25, 3)
    assert progress.last_step.phase_seconds == {"rollout": 6.0, "sleep": 0.5}
    assert progress.last_step.switch_seconds == 1.5
    assert progress.last_checkpoint.step == 6


def test_a_checkpoint_that_is_not_as_it_should_be_is_an_event_of_the_attempt(running: Running) -> None:
    world = running()
    world.run(75)
    attempt = world.status.attempts[-1].model_copy(update={"start_step": None})
    world.status = world.status.model_copy(update={"attempts": [attempt]})
    warnings = {"unverified": "/c/step-4 is used as it is", "set_aside": "set aside as /c/step-6.damaged", "new": "x"}
    for expected in (
        [("CheckpointSetAside", warnings["set_aside"]), ("CheckpointUnverified", warnings["unverified"])],
        [],
    ):
        plan = reconcile(with_driver(world, checkpoint_warnings=warnings), world.now)
        world.status = plan.status
        assert [(event.reason, event.message) for event in plan.events] == expected
        assert plan.urgent == bool(expected)


def test_what_a_driver_goes_on_without_is_said_once_an_attempt(running: Running) -> None:
    world = running()
    world.run(75)
    full = "/run/steps.jsonl: No space left on device (120 bytes wanted, 0 bytes free)"

    def said(unwritten: dict[str, str]) -> list[tuple[str, str, str]]:
        plan = reconcile(with_driver(world, unwritten=unwritten), world.now)
        world.status = plan.status
        assert plan.urgent == bool(plan.events), (
            "an event that is stored with the next throttled write would come twice"
        )
        return [(event.type, event.reason, event.message) for event in plan.events]

    assert said({}) == []
    told = f"The driver cannot write step records and goes on without: {full}"
    assert said({"step records": full}) == [("Warning", "WriteFailed", told)]
    assert said({"step records": "/run/steps.jsonl: another time"}) == []
    ((_, _, told),) = said({"step records": full, "trajec\x1btories": ""})
    assert told == "The driver cannot write trajec tories and goes on without: its log says why"
    assert world.status.attempts[-1].unwritten == ["step records", "trajec tories"]
    assert len(said({str(number): "" for number in range(40)})) == 14, "a status has an end"
    assert said({str(number): "" for number in range(40)}) == []
    world.driver_exits(1)
    world.run(200)
    assert len(world.status.attempts) == 2
    assert [kind for _, kind, _ in said({"step records": full})] == ["WriteFailed"]


def test_a_run_that_stopped_early_says_so_and_is_done_at_its_own_step(running: Running) -> None:
    world = running()
    world.run(75)
    last = replace(world.observed().driver.last, stopped_early="no value was above 0.5\x1b")  # type: ignore[union-attr]
    plan = reconcile(with_driver(world, last=last), world.now)
    world.status = plan.status
    assert plan.status.progress is not None
    assert plan.status.progress.stopped_early == "no value was above 0.5 "
    world.driver_exits(0, SubmissionState.SUCCEEDED)
    observed = world.observed()
    done = reconcile(observed, world.now).status
    assert done.phase is JobPhase.SUCCEEDED
    assert done.message == "Stopped early after step 7: no value was above 0.5 "
    assert done.progress is not None
    assert (done.progress.step, done.progress.steps) == (7, 40)
    said = explain(replace(observed, job=replace(observed.job, status=done)), world.now)
    assert "7 steps, stopped early: no value was above 0.5" in str(said)


def test_values_that_json_cannot_hold_are_left_out(running: Running) -> None:
    world = running()
    bad = StepView(5, math.inf, {"rollout": math.nan, "sleep": -1.0, "wake_up": 1.0}, -3.0, math.nan, math.inf, 1e300)
    plan = reconcile(with_driver(world, last=bad, median_step_seconds=math.nan, step=10**12), world.now)
    progress = plan.status.progress
    assert progress is not None
    assert progress.last_step is not None
    assert progress.last_step.phase_seconds == {"wake_up": 1.0}
    assert progress.last_step.seconds is progress.last_step.time is progress.reward_mean is progress.eta is None
    RLJobStatus.model_validate_json(plan.status.model_dump_json(by_alias=True, exclude_none=True), strict=True)


@pytest.mark.parametrize("seconds", [1e300, 1e308, 1e12])
def test_a_time_left_that_the_status_cannot_hold_is_not_told(running: Running, seconds: float) -> None:
    world = running()
    plan = reconcile(with_driver(world, median_step_seconds=seconds), world.now)
    assert plan.status.progress is not None
    assert plan.status.progress.eta is plan.status.progress.eta_seconds is None
    RLJobStatus.model_validate_json(plan.status.model_dump_json(by_alias=True, exclude_none=True), strict=True)


def test_driver_that_is_not_ready_has_not_loaded_its_checkpoint_and_takes_nothing_back(running: Running) -> None:
    world = running()
    world.run(75)
    world.driver_exits(1)
    while not world.running:
        world.pass_time(5)
        world.look()
    assert world.status.phase is JobPhase.STARTING
    assert world.status.progress is not None
    assert world.status.progress.step == 7


def test_progress_that_does_not_change_is_not_written_again_for_a_minute(running: Running) -> None:
    world = running()
    frozen = world.observed()
    world.look()
    world.now += 30
    assert reconcile(replace(frozen, job=world.observed().job), world.now).status == world.status
    world.now += 31
    assert reconcile(replace(frozen, job=world.observed().job), world.now).status != world.status


def test_time_left_follows_the_steps_that_are_wanted(running: Running) -> None:
    world = running()
    world.run(60)
    world.edit(steps=400)
    world.look(driver_answers=False)
    assert world.status.progress is not None
    assert (world.status.progress.steps, world.status.progress.eta) == (400, "1h05m")


# --- goodput -----------------------------------------------------------------------------------


def goodput(world: World) -> Goodput:
    assert world.status.goodput is not None
    return world.status.goodput


def test_time_is_counted_for_the_phase_that_it_was_spent_in(world: World) -> None:
    world.capacity = False
    world.run(100)
    world.capacity = True
    while world.status.phase is not JobPhase.SUCCEEDED:
        world.pass_time(5)
        world.look()
    sums = goodput(world)
    began = seconds_of(world.status.start_time or "")
    assert sums.queued_seconds == pytest.approx(100, abs=5)
    assert sums.starting_seconds == pytest.approx(35, abs=10)
    assert sums.running_seconds == pytest.approx(400, abs=10)
    assert sums.queued_seconds + sums.starting_seconds + sums.running_seconds == world.now - began
    assert sums.active_seconds == sums.running_seconds


@pytest.mark.parametrize(
    ("placed", "queued", "starting"),
    [((1010.0, 1040.0), 40, 60), ((1010.0, None), 100, 0), ((), 100, 0), ((900.0,), 0, 100), ((2000.0,), 100, 0)],
    ids=["when the last got its node", "one has none", "no pods", "before it was queued", "a clock ahead"],
)
def test_time_in_the_queue_ends_with_the_last_pods_placement(
    running: Running, placed: tuple[float | None, ...], queued: int, starting: int
) -> None:
    """However late the operator comes to see it."""
    pods = tuple(PodView(str(i), str(i), PodRole.WORKER, "Running", True, scheduled=at) for i, at in enumerate(placed))
    observed = replace(running().observed(), pods=pods)
    status = RLJobStatus(phase=JobPhase.QUEUED, goodput=Goodput(since=time_text(1000.0)))
    plan = PlanBuilder(replace(observed, job=replace(observed.job, status=status)), 1100.0)
    settle(plan, JobPhase.RUNNING)
    assert plan.status.goodput is not None
    assert (plan.status.goodput.queued_seconds, plan.status.goodput.starting_seconds) == (queued, starting)


def test_that_pods_have_nodes_is_written_with_what_comes_next_or_after_a_while(world: World) -> None:
    while world.status.phase is not JobPhase.QUEUED:
        world.look()
    queued = world.observed()
    pods = tuple(replace(pod, node="n", phase="Pending", ready=False) for pod in queued.pods)
    cluster = replace(queued.cluster, ready=False, desired_workers=len(pods) - 1) if queued.cluster else None
    plan = reconcile(replace(queued, pods=pods, cluster=cluster), world.now)
    assert (plan.status.phase, plan.urgent) == (JobPhase.STARTING, False)


def test_looking_often_seldom_or_not_at_all_gives_the_same_sums(world: World) -> None:
    status = RLJobStatus(phase=JobPhase.STARTING, goodput=Goodput(since=time_text(1000.0), starting_seconds=7.0))
    assert settled(status, 4600.0).starting_seconds == 3607.0
    assert settled(status, 4600.9).starting_seconds == 3607.0
    assert settled(status, 900.0).starting_seconds == 7.0, "a clock that goes back takes nothing away"


def test_operator_that_was_away_counts_what_it_left(running: Running) -> None:
    world = running(steps=2000)
    before = goodput(world)
    world.pass_time(3600)
    world.edit(suspend=True)
    world.run(60)
    assert world.status.phase is JobPhase.SUSPENDED
    assert goodput(world).running_seconds - before.running_seconds == pytest.approx(3600, abs=20)
    assert goodput(world).starting_seconds == before.starting_seconds


def test_steps_that_ran_again_are_lost_work(running: Running) -> None:
    world = running()
    world.run(85)
    assert int(world.running[0].step) == 8
    world.driver_exits(1)
    while world.status.phase is not JobPhase.SUCCEEDED:
        world.pass_time(5)
        world.look()
    sums = goodput(world)
    assert (sums.useful_seconds, sums.lost_seconds) == (390.0, 20.0), "the last step was not read any more"


def test_records_read_in_part_take_nothing_away(running: Running) -> None:
    world = running()
    world.run(85)
    before = goodput(world)
    plan = reconcile(with_driver(world, useful_seconds=10.0, lost_seconds=0.0), world.now)
    assert plan.status.goodput == before


def test_everything_is_lost_with_the_run_folder(running: Running) -> None:
    world = running()
    world.run(85)
    assert goodput(world).useful_seconds == 80
    world.folder_is_lost()
    world.driver_exits(1)
    while world.status.attempt == 0 or world.status.phase is not JobPhase.RUNNING:
        world.pass_time(5)
        world.look()
    sums = goodput(world)
    assert (sums.useful_seconds, sums.lost_seconds, sums.lost_steps) == (0, 80, 8)
    world.run(50)
    assert goodput(world).useful_seconds == pytest.approx(50, abs=10)
    assert goodput(world).lost_seconds == 80


# --- texts and times ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.9, "59s"), (60, "1m"), (3599, "59m"), (11520, "3h12m"), (172800, "2d0h"), (5e5, "5d18h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_times_are_whole_seconds_and_read_back() -> None:
    assert time_text(1_700_000_000.9) == "2023-11-14T22:13:20Z"
    assert seconds_of("2023-11-14T22:13:20Z") == seconds_of("2023-11-14T23:13:20.000+01:00") == 1_700_000_000


def test_texts_of_strangers() -> None:
    assert clean("a\x00b\ud800c\nd", 100) == "a b?c\nd"
    assert clean("x" * 11, 10) == "x" * 9 + "…"
    assert reason_word("9 lives: Pod's end", "Other") == "livesPodsend"
    assert reason_word("...", "Other") == "Other"
    assert short_value("now") == "now"
    assert short_value("") != ""
    assert len(short_value("y" * 201)) < 100
