"""When a running driver has to end: the user wants it, a deadline is over, or what it needs is gone."""

from __future__ import annotations

from rljob_api.how_many import how_many
from rljob_api.spec import FailureReason
from rljob_api.status import AttemptStatus, ConditionType
from rljob_operator.state.causes import Cause
from rljob_operator.state.failures import pod_failure
from rljob_operator.state.goodput import active_seconds
from rljob_operator.state.observed import SubmissionState
from rljob_operator.state.plan import Stop
from rljob_operator.state.plan_builder import PlanBuilder
from rljob_operator.state.reasons import EndReason, caused
from rljob_operator.state.release import release_cluster
from rljob_operator.state.status_text import clean
from rljob_operator.state.timing import (
    DEADLINE_MARGIN_SECONDS,
    LINGER_SECONDS,
    LOST_POD_SECONDS,
    duration_text,
    longest_phase_seconds,
    seconds_of,
    seconds_since,
    stop_deadline,
    time_text,
)


def active_deadline_is_over(plan: PlanBuilder) -> bool:
    """Whether `activeDeadlineSeconds` is used up.

    It counts the time in which the job held devices since it first ran: restarts and their waits are in it, waiting in
    a queue and suspension are not.
    """
    limit = plan.spec.active_deadline_seconds
    return limit is not None and active_seconds(plan.status, plan.now) >= limit


def deadline_text(plan: PlanBuilder) -> str:
    """Why the job fails when that deadline is over."""
    return (
        f"The job has been active for longer than spec.activeDeadlineSeconds ({plan.spec.active_deadline_seconds} s)."
    )


def stop_what_must_end(plan: PlanBuilder) -> None:
    """Ask the running driver to stop where there is a reason, and give its cluster up when it does not obey."""
    attempt = plan.attempt
    if attempt is None:
        return
    if attempt.stop_time is None:
        cause = _reason_to_stop(plan, attempt)
        if cause is None:
            return
        plan.set_attempt(reason=cause.reason, message=clean(cause.message), stop_time=time_text(plan.now))
        plan.note("Normal", "Stopping", f"Attempt {attempt.number} is asked to stop: {cause.message}")
    _press(plan)


def _press(plan: PlanBuilder) -> None:
    attempt, cluster = plan.attempt, plan.own_cluster
    assert attempt is not None
    assert attempt.submission_id is not None
    if cluster is None:
        return
    if cluster.deleting:
        release_cluster(plan)
        return
    if plan.now < stop_deadline(plan.spec, attempt):
        known = plan.submission is not None and plan.submission.state is not SubmissionState.MISSING
        if known:
            plan.act(Stop(attempt.submission_id), status_first=True)
        return
    if plan.cluster_status.released_uid != cluster.uid:
        late = f"it did not end within {plan.spec.checkpoint.grace_seconds:g} s (spec.checkpoint.graceSeconds)"
        plan.set_attempt(message=clean(f"{attempt.message or ''} {late[0].upper()}{late[1:]}.".strip()))
        plan.note("Warning", "StopTimedOut", f"Attempt {attempt.number} is given up with its cluster: {late}.")
    release_cluster(plan)


def _reason_to_stop(plan: PlanBuilder, attempt: AttemptStatus) -> Cause | None:
    if active_deadline_is_over(plan):
        return Cause(EndReason.DEADLINE, deadline_text(plan))
    if plan.spec.suspend:
        return caused(EndReason.SUSPENDED)
    if attempt.steps is not None and plan.spec.steps < attempt.steps and plan.step >= plan.spec.steps:
        return Cause(
            EndReason.STEPS_DONE,
            f"{how_many(plan.step, 'step is', 'steps are')} done; spec.steps was lowered to {plan.spec.steps}.",
        )
    return _late_start(plan, attempt) or _lost_pod(plan, attempt) or _silent_driver(plan) or _stuck_driver(plan)


def _late_start(plan: PlanBuilder, attempt: AttemptStatus) -> Cause | None:
    """The time begins when Ray has the driver: the queue, the images and a head that answers late come before.

    A head that never has it is given the same time.
    """
    limit = plan.spec.timeouts.start_seconds
    began = attempt.accept_time or attempt.start_time
    late = seconds_since(began, plan.now) >= limit + DEADLINE_MARGIN_SECONDS
    if attempt.start_step is not None or not late:
        return None
    what = (
        "The driver was not ready within {} s of its start"
        if attempt.accept_time
        else ("Ray did not take the driver within {} s of its submission")
    )
    text = f"{what.format(f'{limit:g}')} (spec.timeouts.startSeconds)"
    silent = plan.observed.submission_error or plan.observed.driver_error
    return Cause(FailureReason.START_TIMEOUT, f"{text}; {silent}" if silent else f"{text}.")


def _lost_pod(plan: PlanBuilder, attempt: AttemptStatus) -> Cause | None:
    cause = pod_failure(plan.observed, attempt, fatal=True)
    if cause is None or attempt.notice_time is None:
        return None
    if plan.now - seconds_of(attempt.notice_time) < LOST_POD_SECONDS:
        return None
    return Cause(attempt.reason or cause.reason, attempt.message or cause.message)


def _silent_driver(plan: PlanBuilder) -> Cause | None:
    """The driver enforces its phases' deadlines; one that is silent for longer than any of them cannot any more."""
    since = plan.status_since(ConditionType.RUNNING, "Unknown")
    limit = longest_phase_seconds(plan.spec)
    if since is None or plan.driver is not None or plan.now - since < limit + DEADLINE_MARGIN_SECONDS:
        return None
    error = plan.observed.driver_error or plan.observed.submission_error or "no answer"
    text = f"The driver has not answered for {duration_text(plan.now - since)}, longer than any phase may take"
    return Cause(FailureReason.PHASE_TIMEOUT, f"{text} (spec.timeouts): {error}")


def _stuck_driver(plan: PlanBuilder) -> Cause | None:
    """One that answers and makes no progress holds its devices for ever: its own deadline did not end it."""
    driver, timeouts = plan.driver, plan.spec.timeouts
    if driver is None or not driver.ready or driver.phase_seconds is None:
        return None
    if driver.phase is not None:
        limit = timeouts.phases.get(driver.phase, timeouts.phase_seconds)
    else:
        # Between two phases nothing takes long; before its end a driver waits until its last record was read.
        limit = max(longest_phase_seconds(plan.spec), plan.spec.records.linger_seconds or LINGER_SECONDS)
    if driver.phase_seconds < limit + DEADLINE_MARGIN_SECONDS:
        return None
    what = f"Phase {clean(driver.phase, 100)} has run" if driver.phase is not None else "No phase has run"
    text = f"{what} for {duration_text(driver.phase_seconds)}, and the driver did not end for it (spec.timeouts)"
    return Cause(FailureReason.PHASE_TIMEOUT, f"{text}.")
