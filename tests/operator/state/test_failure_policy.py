"""Why attempts fail, and what becomes of the job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from simulation import UID, Cluster, World, make_spec

from rljob_api.spec import FailurePolicy, FailureReason
from rljob_api.status import AttemptStatus, JobPhase
from rljob_operator.state.causes import Cause
from rljob_operator.state.failures import backoff_seconds, decide, pod_failure
from rljob_operator.state.observed import GonePod, PodRole, SubmissionState
from rljob_operator.state.plan import CreateCluster, DeleteCluster, Stop
from rljob_operator.state.reconcile import reconcile
from rljob_operator.state.timing import seconds_of

Running = Callable[..., World]


def policy(*rules: dict[str, Any], **fields: Any) -> FailurePolicy:
    return make_spec(failurePolicy={"rules": list(rules), **fields}).failure_policy


def settle(world: World, seconds: float = 1500) -> None:
    """Run until the present attempt has ended and the next one runs, or the job has ended."""
    number, end = world.status.attempt or 0, world.now + seconds
    while world.now < end:
        world.pass_time(5)
        world.look()
        if world.status.phase in (JobPhase.FAILED, JobPhase.SUCCEEDED):
            return
        if world.status.phase is JobPhase.RUNNING and (world.status.attempt or 0) > number:
            return
    raise AssertionError(f"still {world.status.phase}: {world.status.message}")


def first(world: World) -> AttemptStatus:
    return world.status.attempts[0]


# --- the policy itself -------------------------------------------------------------------------

DRIVER, USER = Cause(FailureReason.DRIVER_EXITED, ""), Cause("UserError", "")


@pytest.mark.parametrize(
    ("rules", "cause", "code", "action"),
    [
        ([], DRIVER, 1, "Restart"),
        ([], DRIVER, None, "Restart"),
        ([], USER, 2, "Fail"),
        ([], Cause("Stopped", ""), 75, "Ignore"),
        ([], Cause("Stopped", ""), None, "Ignore"),
        ([], Cause(FailureReason.NODE_LOST, ""), 75, "Ignore"),
        ([], Cause(FailureReason.EVICTED, "Worker pod a was evicted."), None, "Restart"),
        ([], Cause(FailureReason.PREEMPTED, "whatever it says"), 1, "Ignore"),
        ([{"reasons": ["Evicted"], "action": "Fail"}], Cause(FailureReason.PREEMPTED, ""), None, "Fail"),
        ([{"reasons": ["Preempted"], "action": "Fail"}], Cause(FailureReason.EVICTED, ""), None, "Restart"),
        ([], Cause("OfANewerOperator", ""), 1, "Restart"),
        ([{"action": "Fail"}], DRIVER, 1, "Fail"),
        ([{"exitCodes": [1, 3], "action": "Fail"}], DRIVER, 3, "Fail"),
        ([{"exitCodes": [3], "action": "Fail"}], DRIVER, 1, "Restart"),
        ([{"exitCodes": [1], "action": "Fail"}], DRIVER, None, "Restart"),
        ([{"exitCodes": [137], "action": "Ignore"}], DRIVER, -9, "Ignore"),
        ([{"exitCodes": [2], "action": "Restart"}], USER, 2, "Restart"),
        ([{"exitCodes": [75], "action": "Fail"}], Cause("Stopped", ""), 75, "Fail"),
        ([{"reasons": ["NodeLost"], "action": "Ignore"}], Cause(FailureReason.NODE_LOST, ""), 1, "Ignore"),
        ([{"reasons": ["NodeLost"], "action": "Ignore"}], DRIVER, 1, "Restart"),
        ([{"reasons": ["DriverExited"], "exitCodes": [3], "action": "Fail"}], DRIVER, 1, "Restart"),
        ([{"reasons": ["DriverExited"], "exitCodes": [3], "action": "Fail"}], DRIVER, 3, "Fail"),
        ([{"exitCodes": [1], "action": "Ignore"}, {"action": "Fail"}], DRIVER, 1, "Ignore"),
        ([{"exitCodes": [1], "action": "Ignore"}, {"action": "Fail"}], DRIVER, 4, "Fail"),
    ],
)
def test_first_rule_that_matches_decides(rules: list[Any], cause: Cause, code: int | None, action: str) -> None:
    assert decide(policy(*rules), cause, code, asked_to_stop=False).action == action


def test_stop_that_the_operator_asked_for_because_of_a_failure_counts() -> None:
    late = Cause(FailureReason.START_TIMEOUT, "")
    assert decide(policy(), late, 75, asked_to_stop=True).action == "Restart"


def test_rule_is_named_where_it_has_a_name() -> None:
    rules = policy({"name": "gpu-fell-off", "action": "Fail"})
    assert decide(rules, DRIVER, 1, False).because == "rule gpu-fell-off of spec.failurePolicy.rules says Fail"


def ended(*spans: tuple[int | None, int]) -> list[AttemptStatus]:
    return [AttemptStatus(number=i, start_step=begin, end_step=end) for i, (begin, end) in enumerate(spans)]


@pytest.mark.parametrize(
    ("attempts", "seconds"),
    [
        (ended((0, 0)), 5),
        (ended((0, 0), (None, 0)), 10),
        (ended((0, 0), (None, 0), (0, 0)), 20),
        (ended(*[(0, 0)] * 10), 60),
        (ended((0, 0), (0, 0), (0, 7)), 5),
        (ended((0, 0), (0, 7), (6, 6), (6, 6)), 10),
    ],
)
def test_backoff_doubles_up_to_its_limit_and_begins_anew_after_a_completed_step(
    attempts: list[AttemptStatus], seconds: float
) -> None:
    assert backoff_seconds(policy(), attempts) == seconds


# --- in a life ---------------------------------------------------------------------------------


def test_driver_failure_restarts_in_the_same_cluster_after_the_backoff(running: Running) -> None:
    world = running()
    cluster = world.cluster
    world.run(75)
    step = int(world.running[0].step)
    world.driver_exits(1)
    failed_at = world.now
    plan = world.look()
    assert plan.status.phase is JobPhase.STARTING
    assert plan.status.restarts == 1
    assert plan.requeue_after == 5
    assert "The next one begins after" in (plan.status.message or "")
    assert "last words" in (first(world).message or "")
    settle(world)
    assert world.cluster is cluster
    assert [r.id for r in world.runs] == [f"rljob-{UID}-0", f"rljob-{UID}-1"]
    assert world.now - failed_at >= 5 + world.start_seconds
    assert (first(world).exit_code, first(world).end_step, first(world).counted) == (1, step, True)
    assert first(world).last_log_lines == ["one", "last words"]
    assert world.status.attempts[1].start_step == step // 3 * 3, "the last checkpoint"


def test_restarts_end_at_the_policy(running: Running) -> None:
    world = running(failurePolicy={"maxRestarts": 2})
    for _ in range(3):
        world.driver_exits(1)
        settle(world)
    assert world.status.phase is JobPhase.FAILED
    assert world.status.restarts == 2
    assert len(world.runs) == 3
    assert "all 2 restarts are used" in (world.status.message or "")
    assert not world.holds_cluster, "a failed job holds no devices"


def test_no_restart_at_all(running: Running) -> None:
    world = running(failurePolicy={"maxRestarts": 0})
    world.driver_exits(1)
    settle(world)
    assert world.status.phase is JobPhase.FAILED
    assert "spec.failurePolicy.maxRestarts is 0" in (world.status.message or "")


def test_policy_that_is_raised_while_the_job_runs_holds_for_the_next_failure(running: Running) -> None:
    world = running(failurePolicy={"maxRestarts": 0})
    world.edit(failure_policy=policy(maxRestarts=1))
    world.driver_exits(1)
    settle(world)
    assert world.status.phase is JobPhase.RUNNING


def test_user_error_fails_at_once(running: Running) -> None:
    world = running()
    world.driver_exits(2)
    settle(world)
    assert world.status.phase is JobPhase.FAILED
    condition = next(c for c in world.status.conditions if c.type == "Failed")
    assert condition.reason == "UserError"
    assert "a restart cannot help" in condition.message
    assert len(world.runs) == 1


def test_ignored_failures_are_not_counted_and_at_most_ten_attempts_are_kept(running: Running) -> None:
    world = running(failurePolicy={"maxRestarts": 0, "rules": [{"exitCodes": [9], "action": "Ignore"}]})
    for _ in range(12):
        world.driver_exits(9)
        settle(world)
    assert world.status.phase is JobPhase.RUNNING
    assert world.status.restarts == 0
    assert [attempt.number for attempt in world.status.attempts] == list(range(3, 13))
    assert world.status.failed_attempts == {"DriverExited": 12}


@pytest.mark.parametrize(("code", "state"), [(75, SubmissionState.FAILED), (None, SubmissionState.STOPPED)])
def test_driver_that_someone_stopped_goes_on_uncounted(
    running: Running, code: int | None, state: SubmissionState
) -> None:
    world = running(failurePolicy={"maxRestarts": 0})
    world.driver_exits(code, state)
    settle(world)
    assert world.status.phase is JobPhase.RUNNING
    assert (first(world).reason, first(world).counted) == ("Stopped", False)


CAUSES: list[tuple[str, Callable[[World], None]]] = [
    ("DriverExited", lambda w: w.driver_exits(1)),
    ("DriverExited", lambda w: w.driver_exits(-11)),
    ("PhaseTimeout", lambda w: w.driver_exits(4)),
    ("HeadLost", lambda w: w.head_container_restarts()),
    ("HeadLost", lambda w: w.pod_fails(PodRole.HEAD, "Error")),
    ("OutOfMemory", lambda w: w.pod_fails(PodRole.HEAD, "OOMKilled")),
    ("OutOfMemory", lambda w: w.pod_fails(PodRole.WORKER, "OOMKilled")),
    ("Evicted", lambda w: w.pod_fails(PodRole.WORKER, "Evicted")),
    ("PodLost", lambda w: w.pod_fails(PodRole.WORKER, "Error")),
    ("HeadLost", lambda w: w.cluster_is_deleted()),
]


@pytest.mark.parametrize(("reason", "cause"), CAUSES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CAUSES)])
def test_cause_is_recognised_and_the_job_goes_on(running: Running, reason: str, cause: Callable[[World], None]) -> None:
    world = running()
    cause(world)
    world.look()
    settle(world)
    assert world.status.phase is JobPhase.RUNNING
    assert first(world).reason == reason
    assert first(world).message
    assert first(world).counted
    assert world.status.restarts == 1


def test_worker_that_was_lost_and_deleted_before_anyone_looked(running: Running) -> None:
    world = running()
    world.pod_fails(PodRole.WORKER, "OOMKilled")
    world.pass_time(10)
    world.look()
    assert first(world).reason == "PodLost"
    assert "1 of 2 worker pods" in (first(world).message or "")


@pytest.mark.parametrize(("died", "reason"), [(1.0, "OutOfMemory"), (-60.0, "DriverExited")])
def test_worker_that_died_in_the_attempt_explains_its_end_after_it_was_replaced(
    running: Running, died: float, reason: str
) -> None:
    world = running()
    began = seconds_of(str(first(world).start_time))
    worker = next(pod for pod in world.observed().pods if pod.role is PodRole.WORKER)
    gone = replace(worker, name="gone", phase="Failed", ready=False, terminated_reason="OOMKilled", exit_code=137)
    cause = pod_failure(replace(world.observed(), gone_pods=(GonePod(gone, began + died),)), first(world))
    assert (cause.reason if cause else "DriverExited") == reason


def test_worker_that_was_deleted_and_replaced_explains_the_end(running: Running) -> None:
    world = running()
    worker = next(pod for pod in world.observed().pods if pod.role is PodRole.WORKER)
    gone = GonePod(replace(worker, name="gone"), seconds_of(str(first(world).start_time)) + 1)
    cause = pod_failure(replace(world.observed(), gone_pods=(gone,)), first(world))
    assert cause is not None
    assert (cause.reason, cause.message) == ("PodLost", "Worker pod gone was deleted.")


def test_signal_is_named(running: Running) -> None:
    world = running()
    world.driver_exits(-11)
    world.look()
    assert "was killed by SIGSEGV" in (first(world).message or "")
    assert first(world).exit_code == -11


def test_user_error_is_one_even_when_a_pod_is_lost_too(running: Running) -> None:
    world = running()
    world.driver_exits(2)
    world.pod_fails(PodRole.WORKER, "Evicted")
    settle(world)
    assert world.status.phase is JobPhase.FAILED
    assert first(world).reason == "UserError"


def test_preemption_waits_in_the_queue_and_is_not_counted(running: Running) -> None:
    world = running(failurePolicy={"maxRestarts": 0})
    world.queue_takes_devices()
    world.run(60)
    assert world.status.phase is JobPhase.QUEUED
    assert (first(world).reason, first(world).counted) == ("Preempted", False)
    world.queue_admits()
    settle(world)
    assert world.status.phase is JobPhase.RUNNING


@pytest.mark.parametrize("code", [1, -9, 4, 70, None])
def test_preemption_is_not_counted_whatever_the_driver_ends_with(running: Running, code: int | None) -> None:
    """Its workers go first: it may lose them before it is asked to stop."""
    world = running(failurePolicy={"maxRestarts": 0})
    world.queue_takes_devices()
    world.look()
    assert first(world).reason == "Preempted"
    world.driver_exits(code)
    world.look()
    assert (first(world).exit_code, first(world).reason) == (code, "Preempted")
    world.run(60)
    assert (world.status.phase, world.status.restarts) == (JobPhase.QUEUED, 0)
    assert not first(world).counted
    world.queue_admits()
    settle(world)
    assert world.status.phase is JobPhase.RUNNING


def test_preemption_that_an_older_operator_noted_is_not_counted(running: Running) -> None:
    world = running(failurePolicy={"maxRestarts": 0})
    world.queue_takes_devices()
    world.look()
    noted = first(world).model_copy(update={"reason": "Evicted"})
    world.status = world.status.model_copy(update={"attempts": [noted]})
    world.run(60)
    assert (world.status.phase, first(world).reason) == (JobPhase.QUEUED, "Preempted")


@pytest.mark.parametrize("lost", [tuple(PodRole), (PodRole.WORKER,)], ids=["HeadLost", "PodLost"])
def test_preemption_that_is_seen_after_the_loss_of_its_pods(running: Running, lost: tuple[PodRole, ...]) -> None:
    """The watches of pods and clusters are not ordered: the pods' deletion may be known before the queue's wish."""
    world = running(failurePolicy={"maxRestarts": 0})
    before = world.observed().cluster
    world.queue_takes_devices()
    world.pass_time(5)
    observed = world.observed()
    seen = [replace(pod, deleting=pod.deleting and pod.role in lost) for pod in observed.pods]
    stale = replace(observed, cluster=before, pods=tuple(seen))
    plan = reconcile(stale, world.now)
    assert plan.status.attempts[0].reason == ("HeadLost" if PodRole.HEAD in lost else "PodLost")
    world.status = plan.status
    world.run(60)
    assert (world.status.phase, world.status.restarts) == (JobPhase.QUEUED, 0)
    assert (first(world).reason, first(world).counted) == ("Preempted", False)
    world.queue_admits()
    settle(world)
    assert world.status.phase is JobPhase.RUNNING


def test_preemption_does_not_take_the_place_of_a_stop_that_was_asked_for(running: Running) -> None:
    world = running()
    world.edit(suspend=True)
    world.look()
    world.queue_takes_devices()
    world.run(60)
    assert world.status.phase is JobPhase.SUSPENDED
    assert first(world).reason == "Suspended"


def test_preemption_does_not_excuse_what_the_job_did_itself(running: Running) -> None:
    world = running()
    world.pod_fails(PodRole.WORKER, "OOMKilled")
    status = reconcile(replace(world.observed(), submission=None), world.now).status
    assert status.attempts[0].reason == "OutOfMemory"
    world.status = status
    world.queue_takes_devices()
    plan = reconcile(replace(world.observed(), submission=None), world.now)
    assert plan.status.attempts[0].reason == "OutOfMemory"


def test_hung_driver_with_a_lost_worker_is_stopped_after_a_while(running: Running) -> None:
    world = running()
    lost_at = world.now
    pod = next(p for p in world.pods if p.role is PodRole.WORKER)
    pod.node_lost = True
    world.run(50)
    assert not any(isinstance(action, Stop) for action in world.actions)
    while not any(isinstance(action, Stop) for action in world.actions):
        world.pass_time(5)
        world.look()
        assert world.now - lost_at <= 75
    assert first(world).reason == "NodeLost"


def test_node_that_comes_back_is_forgiven(running: Running) -> None:
    world = running()
    pod = next(p for p in world.pods if p.role is PodRole.WORKER)
    pod.node_lost = True
    world.run(20)
    assert first(world).reason == "NodeLost"
    pod.node_lost = False
    world.run(200)
    assert world.status.attempt == 0
    assert first(world).reason == "NodeLost", "a failure that follows soon is explained by it"
    world.run(120)
    assert first(world).reason is None
    world.driver_exits(1)
    world.look()
    assert first(world).reason == "DriverExited"


def test_pod_that_was_replaced_and_never_goes_does_not_hurt_the_next_attempt(running: Running) -> None:
    world = running(steps=2000)
    world.node_is_lost()
    world.driver_exits(1)
    for pod in world.pods:
        pod.deleting = 1e9 if pod.node_lost else None
    settle(world)
    world.run(400)
    assert world.status.attempt == 1
    assert world.status.phase is JobPhase.RUNNING
    assert world.status.attempts[1].reason is None


def test_next_attempt_waits_for_the_former_head_to_end(running: Running) -> None:
    world = running()
    for pod in world.pods:
        if pod.role is PodRole.HEAD:
            pod.deleting = 100.0
    world.run(80)
    assert world.status.attempt == 0
    assert len(world.runs) == 1
    assert "former head pod is still ending" in (world.status.message or "")
    settle(world)
    assert world.status.phase is JobPhase.RUNNING


def test_a_driver_on_a_lost_node_is_fenced_off_by_the_next_one(running: Running) -> None:
    most_running, most_committing = 0, 0

    def watch() -> None:
        nonlocal most_running, most_committing
        most_running = max(most_running, len(world.running))
        most_committing = max(most_committing, sum(map(world.may_commit, world.running)))

    world = running(steps=2000)
    world.watch = watch
    world.run(60)
    world.node_is_lost(PodRole.HEAD)
    settle(world, 2000)
    assert first(world).reason == "NodeLost"
    assert (most_running, most_committing) == (2, 1), "the old one trained on, and only one of both could commit"
    assert world.runs[0].exit_code == 1


def test_a_pod_on_a_lost_node_does_not_hold_back_the_others_devices(running: Running) -> None:
    world = running(steps=2000)
    world.node_is_lost(PodRole.HEAD)
    world.edit(suspend=True)
    world.run(200)
    releases = [action for action in world.actions if isinstance(action, DeleteCluster)]
    assert [action.wait for action in releases] == [True, False]
    assert (world.status.phase, world.cluster) == (JobPhase.SUSPENDED, None)
    assert [pod.node_lost for pod in world.pods] == [True]
    assert len(world.running) == 1


def test_the_next_cluster_waits_for_the_pods_of_the_one_before(running: Running) -> None:
    world = running()
    world.driver_hangs()
    world.edit(suspend=True)
    while not isinstance(world.actions[-1], DeleteCluster):
        world.run(5)
    world.edit(suspend=False)
    for pod in world.pods:
        pod.deleting = 100.0
    world.run(90)
    assert len(world.running) == 1, "the driver that hangs is still there"
    assert [type(action) for action in world.actions].count(CreateCluster) == 1
    settle(world)
    assert world.status.phase is JobPhase.RUNNING
    assert [type(action) for action in world.actions].count(CreateCluster) == 2


def test_a_pod_that_is_there_long_after_its_time_is_not_waited_for(running: Running) -> None:
    world = running()
    world.edit(suspend=True)
    world.run(20)
    observed = world.observed()
    assert observed.cluster is not None
    assert observed.cluster.deleting
    assert {pod.deleting for pod in observed.pods} == {True}
    assert reconcile(observed, world.now + 200).actions == ()
    (action,) = reconcile(observed, world.now + 400).actions
    assert action == DeleteCluster(observed.cluster.uid, wait=False)


def test_start_timeout_counts_from_the_ready_cluster(world: World) -> None:
    world.start_seconds = 1e6
    world.capacity = False
    world.run(1000)
    assert world.status.phase is JobPhase.QUEUED, "queueing is no start"
    world.capacity = True
    world.run(40)
    submitted = world.now
    while first(world).end_time is None:
        world.pass_time(5)
        world.look()
        assert world.now - submitted < 1000
    assert 300 <= world.now - submitted <= 400, "timeouts.startSeconds and a margin"
    assert first(world).reason == "StartTimeout"
    assert (first(world).message or "").startswith("The driver was not ready within 300 s of its start (spec.timeouts.")
    assert world.status.restarts == 1


def test_head_that_never_answers_is_replaced_with_its_cluster(world: World) -> None:
    while first_uid(world) is None or not world.status.attempts:
        world.pass_time(5)
        world.look(ray_answers=False)
    uid = first_uid(world)
    for _ in range(120):
        world.pass_time(5)
        world.look(ray_answers=False)
    assert any(isinstance(action, DeleteCluster) and action.uid == uid for action in world.actions)
    assert first(world).reason == "StartTimeout"
    said = "Ray did not take the driver within 300 s of its submission (spec.timeouts.startSeconds); connection refused"
    assert said in (first(world).message or "")
    assert world.runs == []


def first_uid(world: World) -> str | None:
    return world.cluster.uid if world.cluster is not None else None


def test_silent_driver_is_kept_until_the_longest_phase_is_over(running: Running) -> None:
    world = running(steps=2000)
    world.run(60)
    known = world.status.progress
    world.driver_hangs()
    world.run(120)
    condition = next(c for c in world.status.conditions if c.type == "Running")
    assert (condition.status, condition.reason) == ("Unknown", "DriverUnreachable")
    assert known is not None
    assert known.last_update_time is not None
    assert known.last_update_time in condition.message
    assert world.status.progress == known
    world.run(500)
    assert world.status.attempt == 0
    settle(world)
    assert first(world).reason == "PhaseTimeout"


def test_driver_that_answers_again_is_running_again(running: Running) -> None:
    world = running(steps=2000)
    world.driver_hangs()
    world.run(150)
    world.running[0].hangs = False
    world.run(10)
    assert next(c for c in world.status.conditions if c.type == "Running").status == "True"
    assert world.status.attempt == 0


def test_job_api_that_does_not_answer_while_the_driver_does_changes_nothing(running: Running) -> None:
    world = running(steps=2000)
    for _ in range(400):
        world.pass_time(5)
        world.look(ray_answers=False)
    assert world.status.phase is JobPhase.RUNNING
    assert world.status.attempt == 0
    assert next(c for c in world.status.conditions if c.type == "Running").status == "True"


def test_long_logs_and_hostile_text_fit_the_status(running: Running) -> None:
    world = running(failurePolicy={"rules": [{"action": "Ignore"}]})
    lines = tuple("\ud800\x00 bad " + "x" * 10_000 for _ in range(80))
    for _ in range(11):
        world.driver_exits(1)
        observed = world.observed()
        assert observed.submission is not None
        hostile = replace(observed, submission=replace(observed.submission, last_log_lines=lines, message="y" * 10**6))
        world.observed = lambda *_, _h=hostile, **__: _h  # type: ignore[method-assign,misc]
        world.look()
        del world.observed  # type: ignore[method-assign]
        settle(world)
    text = world.status.model_dump_json(by_alias=True, exclude_none=True)
    assert len(text.encode()) < 200_000
    assert "\x00" not in text


def test_head_that_was_lost_before_ray_confirmed_the_submission(world: World) -> None:
    for _ in range(5):
        world.pass_time(5)
        world.look(dies_after=1 if world.status.phase is JobPhase.STARTING else None)
    assert world.status.attempts
    world.look()
    world.head_container_restarts()
    world.pass_time(5)
    world.look()
    assert first(world).reason == "HeadLost", "the session that it was submitted to is not the one that answers"
    settle(world)
    assert [run.id for run in world.runs] == [f"rljob-{UID}-0", f"rljob-{UID}-1"]


def test_preempted_driver_is_given_the_time_to_save(running: Running) -> None:
    world = running()
    world.queue_takes_devices()
    world.driver_hangs()
    world.pass_time(5)
    world.look()
    assert any(pod.deleting for pod in world.pods)
    assert first(world).end_time is None
    world.run(30)
    assert first(world).end_time is not None
    assert world.status.phase is JobPhase.QUEUED


def test_cluster_that_was_replaced_by_another_of_the_job_has_lost_the_driver(running: Running) -> None:
    world = running()
    world.cluster_is_deleted()
    world.cluster = Cluster("made-by-hand")
    for pod in world.pods:
        pod.deleting = 20.0
    world.pass_time(5)
    world.look()
    assert first(world).end_time is not None
    assert first(world).reason == "HeadLost"
    settle(world)
    assert world.status.phase is JobPhase.RUNNING


# --- a driver that answers and makes no progress ------------------------------------------------


def test_a_driver_that_answers_and_makes_no_progress_is_given_up_with_its_cluster(running: Running) -> None:
    world = running(timeouts={"phaseSeconds": 3600, "phases": {"rollout": 600}})
    world.driver_is_stuck()
    world.run(640)
    assert first(world).stop_time is None, "its own deadline comes first"
    world.run(40)
    assert first(world).stop_time is not None
    world.run(300)
    attempt = first(world)
    assert attempt.reason == "PhaseTimeout"
    assert "Phase rollout has run for 1" in (attempt.message or "")
    assert (world.status.attempt, world.status.phase) == (1, JobPhase.RUNNING)


@pytest.mark.parametrize(
    ("phase", "seconds", "stopped"),
    [("rollout", 700.0, True), (None, 700.0, True), (None, 300.0, False), ("x", None, False)],
)
def test_what_a_driver_says_of_its_phase_decides(
    running: Running, phase: str | None, seconds: float | None, stopped: bool
) -> None:
    world = running()
    seen = world.observed()
    assert seen.driver is not None
    seen = replace(seen, driver=replace(seen.driver, phase=phase, phase_seconds=seconds))
    plan = reconcile(seen, world.now)
    assert any(isinstance(action, Stop) for action in plan.actions) is stopped


# --- pods that never get ready -----------------------------------------------------------------


def unready(**changes: Any) -> World:
    """A job one of whose workers has its node and never gets ready."""
    world = World(make_spec(timeouts={"readySeconds": 600, "startSeconds": 300}, **changes))
    world.image_missing = True
    return world


def test_pods_that_are_not_ready_in_time_give_their_devices_back_and_count_as_an_attempt() -> None:
    world = unready(failurePolicy={"maxRestarts": 1, "backoffSeconds": 100, "maxBackoffSeconds": 100})
    world.run(500)
    assert world.status.phase is JobPhase.STARTING
    assert not world.status.attempts
    assert "spec.timeouts.readySeconds" in (world.status.message or "")
    world.run(150)
    (attempt,) = world.status.attempts
    assert attempt.reason == "ReadyTimeout"
    assert "ImagePullBackOff" in (attempt.message or "")
    assert attempt.counted
    assert world.status.phase is JobPhase.QUEUED
    assert not world.holds_cluster, "nothing is held while the next attempt waits"
    world.run(1500)
    assert [a.reason for a in world.status.attempts] == ["ReadyTimeout", "ReadyTimeout"]
    assert world.status.phase is JobPhase.FAILED
    assert not world.holds_cluster
    assert not world.runs


def test_time_in_a_queue_is_no_time_to_get_ready() -> None:
    world = unready()
    world.capacity = False
    world.run(5000)
    assert world.status.phase is JobPhase.QUEUED
    assert not world.status.attempts
    world.capacity, world.image_missing = True, False
    world.run(200)
    assert world.status.phase is JobPhase.RUNNING


def test_a_pod_that_is_made_again_and_again_does_not_begin_the_time_anew() -> None:
    world = unready()
    for _ in range(20):
        world.run(35)
        for pod in world.pods:
            if pod.role is PodRole.WORKER and pod.phase == "Pending" and pod.deleting is None:
                pod.deleting = 5.0
    assert [a.reason for a in world.status.attempts] == ["ReadyTimeout"]


def a_worker_is_lost_before_the_operator_looks() -> World:
    """KubeRay still says that the cluster is ready."""
    world = World(make_spec(timeouts={"readySeconds": 600, "startSeconds": 300}))
    world.look()
    world.pass_time(20)
    world.pod_fails(PodRole.WORKER, "Evicted")
    assert (cluster := world.observed().cluster) is not None
    assert cluster.ready
    return world


def test_nothing_is_submitted_to_pods_that_are_seen_to_be_lost() -> None:
    world = a_worker_is_lost_before_the_operator_looks()
    world.look()
    assert not world.status.attempts
    assert "was evicted" in (world.status.message or "")
    world.run(200)
    assert (world.status.phase, world.status.restarts) == (JobPhase.RUNNING, 0)
    assert [attempt.reason for attempt in world.status.attempts] == [None]


def test_a_kuberay_that_never_notices_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    world = a_worker_is_lost_before_the_operator_looks()
    monkeypatch.setattr(world, "_kuberay", lambda: None)
    world.run(700)
    assert [attempt.reason for attempt in world.status.attempts] == ["ReadyTimeout"]
    assert "was evicted" in (world.status.attempts[0].message or "")
    assert not world.runs


def test_the_drivers_time_to_start_begins_when_ray_has_it() -> None:
    """A head that answers late takes nothing from the driver, whose own deadline comes first and tells more."""
    world = World(make_spec())
    while world.status.phase is not JobPhase.STARTING:
        world.pass_time(5)
        world.look()
    for _ in range(50):
        world.pass_time(5)
        world.look(ray_answers=False)
    world.start_seconds = 250.0
    world.run(300)
    (attempt,) = world.status.attempts
    assert attempt.stop_time is None
    assert world.status.phase is JobPhase.RUNNING
