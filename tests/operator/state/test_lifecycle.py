"""The life of a job, edge by edge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from simulation import UID, World, make_spec

from rljob_api.status import Condition, JobPhase
from rljob_operator.state.observed import PodRole, QueueView
from rljob_operator.state.plan import (
    ApplyPolicy,
    ApplySecret,
    CreateCluster,
    DeleteCluster,
    DeleteJob,
    RequestCheckpoint,
    Stop,
    Submit,
)
from rljob_operator.state.reconcile import reconcile

Running = Callable[..., World]


def condition(world: World, kind: str) -> Condition:
    return next(c for c in world.status.conditions if c.type == kind)


def run_until(world: World, phase: JobPhase, seconds: float = 2000.0) -> None:
    end = world.now + seconds
    while world.status.phase is not phase:
        assert world.now < end, f"still {world.status.phase}: {world.status.message}"
        world.pass_time(5)
        world.look()


# --- from creation to the end ------------------------------------------------------------------


def test_first_look_asks_for_everything_and_stores_that_first(world: World) -> None:
    plan = reconcile(world.observed(), world.now)
    assert plan.actions == (ApplySecret(), ApplyPolicy(), CreateCluster())
    assert plan.status_first
    assert plan.status.phase is JobPhase.QUEUED
    assert plan.status.attempt == 0
    assert plan.status.observed_generation == 1


def test_a_life_without_trouble(world: World) -> None:
    phases: list[JobPhase | None] = []
    for _ in range(200):
        world.pass_time(5)
        world.look()
        if not phases or phases[-1] is not world.status.phase:
            phases.append(world.status.phase)
    assert phases == [JobPhase.QUEUED, JobPhase.STARTING, JobPhase.RUNNING, JobPhase.SUCCEEDED]
    assert [type(action) for action in world.actions] == [
        ApplySecret,
        ApplyPolicy,
        CreateCluster,
        Submit,
        DeleteCluster,
    ]
    (attempt,) = world.status.attempts
    assert attempt.submission_id == f"rljob-{UID}-0"
    assert (attempt.start_step, attempt.end_step, attempt.exit_code, attempt.counted) == (0, 40, 0, False)
    assert attempt.last_log_lines == ["one", "last words"]
    assert condition(world, "Succeeded").status == "True"
    assert condition(world, "Succeeded").message == world.status.message == "All 40 steps are done."
    assert condition(world, "ClusterReady").reason == "Released"
    assert world.status.completion_time is not None
    assert world.status.progress is not None
    assert world.status.progress.eta is None
    assert not world.holds_cluster


def test_job_whose_driver_was_never_reached_shows_its_steps_at_the_end(world: World) -> None:
    while not any(type(action) is Submit for action in world.actions):
        world.pass_time(5)
        world.look()
    for _ in range(200):
        world.pass_time(5)
        plan = reconcile(replace(world.observed(), driver=None, driver_error="connection refused"), world.now)
        if plan.status.phase is JobPhase.SUCCEEDED:
            break
    assert plan.status.phase is JobPhase.SUCCEEDED
    assert plan.status.progress is not None
    assert plan.status.progress.step == plan.status.progress.steps > 0


def test_writes_from_creation_to_running(world: World) -> None:
    """At most 8 in all: the objects, and the urgent writes of the status."""
    urgent = 0
    while world.status.phase is not JobPhase.RUNNING:
        world.pass_time(2)
        before = world.status_writes
        plan = world.look()
        urgent += plan.urgent and world.status_writes > before
    objects = [a for a in world.actions if isinstance(a, ApplySecret | ApplyPolicy | CreateCluster)]
    assert urgent + len(objects) <= 7


def test_only_progress_waits_for_the_throttle(running: Running) -> None:
    world = running()
    world.pass_time(20)
    assert not world.look().urgent
    world.driver_exits(1)
    assert world.look().urgent


def test_the_last_steps_numbers_do_not_wait_for_the_throttle(running: Running) -> None:
    world = running()
    observed = world.observed()
    assert observed.driver is not None
    assert observed.job.spec is not None
    last = replace(observed, driver=replace(observed.driver, step=observed.job.spec.steps))
    plan = reconcile(last, world.now)
    assert (plan.status.phase, plan.urgent) == (JobPhase.RUNNING, True)
    stored = replace(last, job=replace(last.job, status=plan.status))
    assert not reconcile(stored, world.now + 20).urgent


@pytest.mark.parametrize(
    ("phase", "seconds"), [(JobPhase.RUNNING, 5.0), (JobPhase.SUCCEEDED, None), (JobPhase.SUSPENDED, None)]
)
def test_when_the_job_is_looked_at_again(world: World, phase: JobPhase, seconds: float | None) -> None:
    if phase is JobPhase.SUSPENDED:
        world.edit(suspend=True)
    run_until(world, phase)
    assert world.look().requeue_after in (seconds, 60.0), "while pods still end"
    if phase is not JobPhase.RUNNING:
        world.run(30)
    assert world.look().requeue_after == seconds


def test_queued_until_every_pod_has_its_node(world: World) -> None:
    world.capacity = False
    world.run(60)
    assert world.status.phase is JobPhase.QUEUED
    assert condition(world, "Queued").status == "True"
    assert condition(world, "Queued").reason == "InsufficientResources"
    assert "Insufficient cpu" in condition(world, "Queued").message
    world.capacity = True
    world.run(10)
    assert world.status.phase is JobPhase.STARTING
    assert condition(world, "Queued").status == "False"


def test_queue_that_has_not_admitted_says_why(world: World) -> None:
    world.look()
    observed = replace(
        world.observed(), queue=QueueView(admitted=False, reason="Pending", message="insufficient quota", object="W a")
    )
    plan = reconcile(observed, world.now)
    assert plan.status.phase is JobPhase.QUEUED
    assert "insufficient quota" in (plan.status.message or "")


def test_start_and_running_times(running: Running) -> None:
    world = running()
    assert world.status.start_time == "2023-11-14T22:13:25Z"
    first = world.status.running_time
    world.driver_exits(1)
    run_until(world, JobPhase.STARTING)
    run_until(world, JobPhase.RUNNING)
    assert world.status.running_time == first, "the first time stays"


def test_transition_times_move_only_with_the_condition(running: Running) -> None:
    world = running()
    before = condition(world, "Running").last_transition_time
    world.run(60)
    assert condition(world, "Running").message != "0 of 40 steps are done."
    assert condition(world, "Running").last_transition_time == before


def test_observed_generation_follows_the_spec(running: Running) -> None:
    world = running()
    world.edit(ttl_seconds_after_finished=60)
    plan = world.look()
    assert plan.urgent
    assert world.status.observed_generation == 2
    assert {c.observed_generation for c in world.status.conditions} == {2}


# --- dying operators ---------------------------------------------------------------------------


@pytest.mark.parametrize("write", range(0, 12))
def test_operator_that_dies_after_any_write_leads_to_the_same_end(write: int) -> None:
    world, done = World(make_spec()), 0
    while world.status.phase is not JobPhase.SUCCEEDED:
        world.pass_time(5)
        before = len(world.actions) + world.status_writes
        world.look(dies_after=max(0, write - done) if done <= write else None)
        done += len(world.actions) + world.status_writes - before + (done == write)
    assert len(world.runs) == 1
    assert world.status.restarts == 0
    assert [attempt.reason for attempt in world.status.attempts] == ["Completed"]
    assert not world.holds_cluster


def test_submission_that_never_reached_the_head_is_repeated(world: World) -> None:
    for _ in range(5):
        world.pass_time(5)
        world.look(dies_after=1 if world.status.phase is JobPhase.STARTING else None)
    assert world.status.attempts
    assert world.runs == []
    world.pass_time(5)
    assert world.look().actions == (Submit(f"rljob-{UID}-0", 0),)
    assert len(world.runs) == 1


def test_status_that_was_changed_by_someone_else_stops_the_actions(world: World) -> None:
    world.look(user_edits_meanwhile=True)
    assert world.actions == []
    assert world.status.phase is None
    world.look()
    assert CreateCluster() in world.actions


# --- suspend and resume ------------------------------------------------------------------------


def test_suspend_saves_then_gives_the_devices_back_and_resume_goes_on(running: Running) -> None:
    world = running()
    world.run(75)
    step = world.running[0].step
    world.edit(suspend=True)
    assert world.look().actions == (Stop(f"rljob-{UID}-0"),)
    assert condition(world, "Suspended").reason == "Suspending"
    uid = world.status.cluster.uid if world.status.cluster else None
    world.pass_time(5)
    plan = world.look()
    assert plan.actions == (DeleteCluster(str(uid)),)
    assert plan.status_first, "how the driver ended is stored before the pods go"
    run_until(world, JobPhase.SUSPENDED)
    assert condition(world, "Suspended").status == "True"
    assert world.status.attempts[0].reason == "Suspended"
    world.edit(suspend=False)
    run_until(world, JobPhase.RUNNING)
    assert world.running[0].step >= int(step)
    assert world.status.restarts == 0
    assert world.status.attempt == 1
    assert world.status.attempts[1].start_step == int(step)
    assert condition(world, "Suspended").status == "False"


def test_driver_that_does_not_stop_in_time_is_given_up_with_its_cluster(running: Running) -> None:
    world = running()
    world.driver_hangs()
    world.edit(suspend=True)
    began = world.now
    run_until(world, JobPhase.SUSPENDED)
    assert 60 <= world.now - began <= 95, "graceSeconds, a margin of 30 s, and the end of its pods"
    assert "did not end within 30 s (spec.checkpoint.graceSeconds)" in (world.status.attempts[0].message or "")
    assert world.status.restarts == 0


def test_suspended_from_the_start_asks_for_nothing(world: World) -> None:
    world.edit(suspend=True)
    world.run(30)
    assert world.status.phase is JobPhase.SUSPENDED
    assert world.actions == []
    assert world.status.attempts == []


def test_suspended_while_queued(world: World) -> None:
    world.capacity = False
    world.run(30)
    world.edit(suspend=True)
    run_until(world, JobPhase.SUSPENDED)
    assert not world.holds_cluster


def test_resumed_while_it_still_stops_goes_on_in_the_same_cluster(running: Running) -> None:
    world = running()
    cluster = world.cluster
    world.edit(suspend=True)
    world.look()
    world.edit(suspend=False)
    run_until(world, JobPhase.STARTING)
    run_until(world, JobPhase.RUNNING)
    assert world.cluster is cluster
    assert world.status.attempt == 1
    assert world.status.restarts == 0


def test_job_that_completes_while_it_is_asked_to_stop_has_succeeded(running: Running) -> None:
    world = running(steps=1)
    world.pass_time(10)
    world.edit(suspend=True)
    world.look()
    assert world.status.phase is JobPhase.SUCCEEDED


def test_cache_that_still_shows_the_cluster_that_was_given_back(running: Running) -> None:
    world = running()
    world.edit(suspend=True)
    world.look()
    world.pass_time(5)
    before = world.observed()
    world.look()
    world.run(5)
    world.edit(suspend=False)
    stale = replace(world.observed(), cluster=before.cluster, pods=before.pods)
    plan = reconcile(stale, world.now)
    assert not any(isinstance(action, Submit | CreateCluster) for action in plan.actions)
    assert plan.status.phase is JobPhase.QUEUED


# --- the head's policy -------------------------------------------------------------------------


def test_policy_that_is_not_as_it_should_be_is_renewed_while_an_attempt_runs(running: Running) -> None:
    world = running()
    world.policy = False
    plan = world.look()
    assert plan.actions == (ApplyPolicy(),)
    assert plan.status_first, "a refusal must not keep the attempt from being followed"
    assert world.look().actions == ()


def test_policy_comes_last_and_once(world: World) -> None:
    run_until(world, JobPhase.QUEUED)
    while not world.status.attempts:
        world.policy = False
        world.pass_time(5)
        plan = world.look()
        assert [type(action) for action in plan.actions].count(ApplyPolicy) == 1
    world.edit(suspend=True)
    world.policy = False
    run_until(world, JobPhase.STARTING)
    world.policy = False
    assert world.look().actions == (Stop(f"rljob-{UID}-0"), ApplyPolicy())


def test_policy_is_no_concern_of_a_suspended_job(running: Running) -> None:
    world = running()
    world.edit(suspend=True)
    run_until(world, JobPhase.SUSPENDED)
    world.policy = False
    assert world.look().actions == ()
    world.run(30)
    world.edit(suspend=False)
    assert world.look().actions == (ApplyPolicy(), CreateCluster())


# --- what is in the way ------------------------------------------------------------------------


def test_cluster_of_the_same_name_that_is_somebody_elses(world: World) -> None:
    world.stranger_makes_cluster()
    world.run(60)
    assert world.actions == []
    assert world.status.phase is JobPhase.PENDING
    assert condition(world, "ClusterReady").reason == "ClusterNameTaken"
    assert "RayCluster job is in the way" in condition(world, "ClusterReady").message
    world.edit(suspend=True)
    run_until(world, JobPhase.SUSPENDED)
    assert world.actions == [], "not even a suspended job touches it"
    world.edit(suspend=False)
    world.stranger_leaves()
    run_until(world, JobPhase.RUNNING)


def test_a_job_whose_names_are_taken_waits_and_one_that_runs_goes_on(world: World, running: Running) -> None:
    said = "RLJob x, which is older, has the Secret x-driver that this job would need too; delete that job."
    plan = reconcile(replace(world.observed(), names_taken=said), world.now)
    assert (plan.status.phase, plan.actions) == (JobPhase.PENDING, ())
    assert (plan.status.message, plan.requeue_after) == (said, 60.0)
    assert {c.reason for c in plan.status.conditions if c.type == "Queued"} == {"NamesTaken"}
    world.look()
    assert world.status.phase is JobPhase.QUEUED
    busy = running()
    assert reconcile(replace(busy.observed(), names_taken=said), busy.now).status.phase is JobPhase.RUNNING


def test_a_head_pod_of_another_cluster_is_not_the_jobs(world: World) -> None:
    world.run(10)
    world.pass_time(60)
    observed = world.observed()
    (mine,) = [pod for pod in observed.pods if pod.role is PodRole.HEAD]
    theirs = replace(mine, name="theirs", uid="theirs", cluster_uid="another")
    plan = reconcile(replace(observed, pods=(theirs, *observed.pods)), world.now)
    assert plan.status.attempts[0].head_uid == mine.uid
    alone = tuple(pod for pod in observed.pods if pod is not mine)
    assert not reconcile(replace(observed, pods=(theirs, *alone)), world.now).status.attempts


def test_spec_that_cannot_be_read(world: World) -> None:
    bad = replace(world.observed().job, spec=None, problem="spec.steps: is missing")
    plan = reconcile(replace(world.observed(), job=bad), world.now)
    assert plan.actions == ()
    assert plan.requeue_after is None
    assert plan.status.phase is JobPhase.PENDING
    assert [(c.type, c.status, c.reason, c.message) for c in plan.status.conditions] == [
        ("Queued", "False", "InvalidSpec", "spec.steps: is missing")
    ]
    assert [event.reason for event in plan.events] == ["InvalidSpec"]
    again = reconcile(replace(world.observed(), job=replace(bad, status=plan.status)), world.now + 60)
    assert again.events == ()


def test_spec_that_becomes_unreadable_leaves_alone_what_runs(running: Running) -> None:
    world = running()
    bad = replace(world.observed().job, spec=None, problem="spec.steps: is missing")
    plan = reconcile(replace(world.observed(), job=bad), world.now)
    assert plan.actions == ()
    assert plan.status.phase is JobPhase.RUNNING
    assert plan.status.message == "spec.steps: is missing"


def test_spec_that_cannot_be_rendered_begins_nothing(world: World) -> None:
    bad = replace(world.observed().job, problem="spec.checkpoint.path: lies in no volume")
    plan = reconcile(replace(world.observed(), job=bad), world.now)
    assert plan.actions == ()
    assert plan.status.phase is JobPhase.PENDING
    assert plan.status.message == bad.problem
    assert [(c.type, c.status, c.reason, c.message) for c in plan.status.conditions] == [
        ("Queued", "False", "InvalidSpec", bad.problem)
    ]
    assert plan.status.start_time is None


NO_IMAGE = "spec.image: is missing, and the operator has no default for profile cpu"


def test_job_that_runs_is_followed_to_its_end_when_its_spec_renders_no_more(running: Running) -> None:
    world = running(ttlSecondsAfterFinished=100)
    world.problem = NO_IMAGE
    world.policy = False
    plan = world.look()
    assert [event.reason for event in plan.events] == ["InvalidSpec"]
    assert (world.status.phase, NO_IMAGE in (world.status.message or "")) == (JobPhase.RUNNING, True)
    assert world.look().events == ()
    run_until(world, JobPhase.SUCCEEDED)
    assert not world.holds_cluster
    world.run(110)
    assert world.deleted


def test_job_whose_spec_renders_no_more_can_be_suspended_and_goes_on_when_it_renders_again(running: Running) -> None:
    world = running()
    world.problem = NO_IMAGE
    world.edit(suspend=True)
    run_until(world, JobPhase.SUSPENDED)
    assert not world.holds_cluster
    world.edit(suspend=False)
    world.run(30)
    assert (world.status.phase, world.status.message) == (JobPhase.PENDING, NO_IMAGE)
    assert condition(world, "Queued").reason == "InvalidSpec"
    assert world.look().requeue_after is None
    world.problem = ""
    run_until(world, JobPhase.RUNNING)
    assert len(world.status.attempts) == 2


def test_no_attempt_follows_one_that_failed_while_the_spec_renders_no_more(running: Running) -> None:
    world = running(activeDeadlineSeconds=300)
    world.problem = NO_IMAGE
    world.driver_exits(1)
    world.run(60)
    assert len(world.runs) == 1
    assert world.status.message == NO_IMAGE
    run_until(world, JobPhase.FAILED)
    assert condition(world, "Failed").reason == "DeadlineExceeded"
    assert not world.holds_cluster


@pytest.mark.parametrize("phase", [JobPhase.QUEUED, JobPhase.STARTING, JobPhase.RUNNING, JobPhase.SUCCEEDED])
def test_deletion_is_left_to_garbage_collection(world: World, phase: JobPhase) -> None:
    run_until(world, phase)
    observed = replace(world.observed(), job=replace(world.observed().job, deleting=True))
    plan = reconcile(observed, world.now)
    assert (plan.actions, plan.events, plan.requeue_after) == ((), (), None)
    assert plan.status == world.status


# --- after the end -----------------------------------------------------------------------------


def test_time_to_live(world: World) -> None:
    world.edit(ttl_seconds_after_finished=100)
    run_until(world, JobPhase.SUCCEEDED)
    assert world.look().requeue_after == 60, "its pods still end"
    world.pass_time(30)
    assert world.look().requeue_after == 70
    world.pass_time(60)
    assert world.look().requeue_after == 10
    assert not world.deleted
    world.pass_time(10)
    plan = world.look()
    assert plan.actions == (DeleteJob(),)
    assert plan.requeue_after is None
    assert world.deleted


def test_time_to_live_of_zero_and_one_that_is_given_later(world: World) -> None:
    run_until(world, JobPhase.SUCCEEDED)
    world.pass_time(1000)
    assert world.look().actions == ()
    world.edit(ttl_seconds_after_finished=0)
    assert world.look().actions == (DeleteJob(),)


def test_finished_job_deletes_a_cluster_that_is_still_there(world: World) -> None:
    while world.status.phase is not JobPhase.SUCCEEDED:
        world.pass_time(5)
        world.look(dies_after=1 if world.running == [] and world.runs else None)
    assert world.cluster is not None, "it died before it deleted the cluster"
    world.look()
    assert not world.holds_cluster
    assert world.look().actions == ()


def test_finished_job_is_not_begun_again_by_an_edit(world: World) -> None:
    run_until(world, JobPhase.SUCCEEDED)
    world.edit(steps=100)
    actions = len(world.actions)
    world.run(60)
    assert world.status.phase is JobPhase.SUCCEEDED
    assert len(world.actions) == actions
    assert world.status.observed_generation == 2


# --- deadlines and steps of the user -----------------------------------------------------------


def test_active_deadline_counts_from_the_first_running(running: Running) -> None:
    world = running(activeDeadlineSeconds=100)
    began = world.now
    run_until(world, JobPhase.FAILED)
    assert 100 <= world.now - began <= 115
    assert condition(world, "Failed").reason == "DeadlineExceeded"
    assert "spec.activeDeadlineSeconds (100 s)" in (world.status.message or "")
    assert world.status.attempts[0].reason == "DeadlineExceeded"
    assert world.folder.checkpoint > 0, "it was stopped, not killed"


def test_suspension_and_queueing_do_not_count_as_active(running: Running) -> None:
    world = running(activeDeadlineSeconds=100)
    world.run(50)
    world.edit(suspend=True)
    run_until(world, JobPhase.SUSPENDED)
    world.pass_time(1000)
    world.capacity = False
    world.edit(suspend=False)
    world.run(500)
    assert world.status.phase is JobPhase.QUEUED
    world.capacity = True
    run_until(world, JobPhase.RUNNING)
    run_until(world, JobPhase.FAILED)
    assert world.status.goodput is not None
    assert 100 <= world.status.goodput.active_seconds <= 115


def test_active_deadline_while_a_restart_is_waited_for(running: Running) -> None:
    world = running(activeDeadlineSeconds=60, failurePolicy={"backoffSeconds": 500, "maxBackoffSeconds": 500})
    world.driver_exits(1)
    run_until(world, JobPhase.FAILED)
    assert condition(world, "Failed").reason == "DeadlineExceeded"


def test_more_steps_than_the_driver_was_given(running: Running) -> None:
    world = running(steps=4)
    world.edit(steps=8)
    run_until(world, JobPhase.SUCCEEDED)
    assert [(a.steps, a.reason, a.counted) for a in world.status.attempts] == [
        (4, "StepsRaised", False),
        (8, "Completed", False),
    ]
    assert world.status.progress is not None
    assert world.status.progress.step == 8


def test_fewer_steps_than_are_done_end_the_job(running: Running) -> None:
    world = running()
    world.run(75)
    world.edit(steps=5)
    assert Stop(f"rljob-{UID}-0") in world.look().actions
    run_until(world, JobPhase.SUCCEEDED)
    assert "spec.steps was lowered to 5" in (world.status.message or "")


def test_steps_that_are_raised_again_while_the_driver_stops_are_done(running: Running) -> None:
    world = running(steps=40)
    world.run(100)
    world.edit(steps=5)
    assert Stop(f"rljob-{UID}-0") in world.look().actions
    world.edit(steps=40)
    run_until(world, JobPhase.SUCCEEDED)
    assert [attempt.reason for attempt in world.status.attempts] == ["StepsRaised", "Completed"]
    assert world.status.restarts in (None, 0)
    assert world.status.progress is not None
    assert (world.status.progress.step, world.status.progress.eta) == (40, None)


# --- checkpoints on request --------------------------------------------------------------------


def test_checkpoint_is_asked_for_once_for_each_value(running: Running) -> None:
    world = running()
    world.run(15)
    world.annotate("2026-01-31T12:00:00Z")
    assert world.look().actions == (RequestCheckpoint("2026-01-31T12:00:00Z"),)
    assert condition(world, "Checkpointing").status == "True"
    world.run(30)
    assert world.checkpoints_asked == 1
    assert condition(world, "Checkpointing").status == "False"
    assert condition(world, "Checkpointing").reason == "Saved"
    world.annotate("again")
    world.run(10)
    assert world.checkpoints_asked == 2


def test_request_is_not_stored_before_the_driver_was_asked(running: Running) -> None:
    world = running()
    world.annotate("now")
    world.policy = False
    plan = world.look()
    assert plan.status_first
    assert RequestCheckpoint("now") not in plan.actions
    assert world.status.checkpoint_request is None
    assert world.look().actions == (RequestCheckpoint("now"),)


def test_request_that_died_with_its_driver_is_handed_to_the_next(running: Running) -> None:
    world = running()
    world.run(12)
    world.annotate("x" * 5000)
    world.look()
    assert world.status.checkpoint_request is not None
    assert world.status.checkpoint_request.value.startswith("sha256:")
    world.folder.checkpoint = 0
    world.driver_exits(1)
    world.look()
    assert condition(world, "Checkpointing").reason == "Interrupted"
    run_until(world, JobPhase.RUNNING)
    world.run(5)
    assert world.checkpoints_asked == 2


def test_request_to_a_job_that_does_not_run_waits(world: World) -> None:
    world.annotate("early")
    run_until(world, JobPhase.STARTING)
    assert world.checkpoints_asked == 0
    run_until(world, JobPhase.RUNNING)
    assert world.checkpoints_asked == 1
