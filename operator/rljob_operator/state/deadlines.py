"""When a running driver has to end: the user wants it, a deadline is over, or what it needs is gone."""

from __future__ import annotations

from rljob_api.spec import FailureReason
from rljob_api.status import AttemptStatus, ConditionType
from rljob_operator.state.draft import Draft
from rljob_operator.state.failures import DEADLINE, STEPS_DONE, SUSPENDED, Trouble, pod_trouble
from rljob_operator.state.goodput import active_seconds
from rljob_operator.state.observed import SubmissionState
from rljob_operator.state.plan import DeleteCluster, Stop
from rljob_operator.state.texts import clean
from rljob_operator.state.timing import (
    DEADLINE_MARGIN_SECONDS,
    LOST_POD_SECONDS,
    duration_text,
    longest_phase_seconds,
    seconds_of,
    seconds_since,
    stop_deadline,
    time_text,
)


def active_deadline_is_over(draft: Draft) -> bool:
    """Whether `activeDeadlineSeconds` is used up.

    It counts the time in which the job held devices since it first ran: restarts and their waits are in it, waiting in
    a queue and suspension are not.
    """
    limit = draft.spec.active_deadline_seconds
    return limit is not None and active_seconds(draft.status, draft.now) >= limit


def deadline_text(draft: Draft) -> str:
    """Why the job fails when that deadline is over."""
    return (
        f"The job has been active for longer than spec.activeDeadlineSeconds ({draft.spec.active_deadline_seconds} s)."
    )


def stop_what_must_end(draft: Draft) -> None:
    """Ask the running driver to stop where there is a reason, and give its cluster up when it does not obey."""
    attempt = draft.attempt
    if attempt is None:
        return
    if attempt.stop_time is None:
        trouble = _reason_to_stop(draft, attempt)
        if trouble is None:
            return
        draft.set_attempt(reason=trouble.reason, message=clean(trouble.message), stop_time=time_text(draft.now))
        draft.note("Normal", "Stopping", f"Attempt {attempt.number} is asked to stop: {trouble.message}")
    _press(draft)


def _press(draft: Draft) -> None:
    attempt, cluster = draft.attempt, draft.own_cluster
    assert attempt is not None
    assert attempt.submission_id is not None
    if cluster is None or cluster.deleting:
        return
    if draft.now < stop_deadline(draft.spec, attempt):
        known = draft.submission is not None and draft.submission.state is not SubmissionState.MISSING
        if known:
            draft.act(Stop(attempt.submission_id), status_first=True)
        return
    if draft.cluster_status.released_uid != cluster.uid:
        late = f"it did not end within {draft.spec.checkpoint.grace_seconds:g} s (spec.checkpoint.graceSeconds)"
        draft.set_attempt(message=clean(f"{attempt.message or ''} {late[0].upper()}{late[1:]}.".strip()))
        draft.note("Warning", "StopTimedOut", f"Attempt {attempt.number} is given up with its cluster: {late}.")
    draft.set(cluster=draft.cluster_status.model_copy(update={"released_uid": cluster.uid}))
    draft.act(DeleteCluster(cluster.uid), status_first=True)


def _reason_to_stop(draft: Draft, attempt: AttemptStatus) -> Trouble | None:
    if active_deadline_is_over(draft):
        return Trouble(DEADLINE, deadline_text(draft))
    if draft.spec.suspend:
        return Trouble(SUSPENDED, "spec.suspend is true.")
    if attempt.steps is not None and draft.spec.steps < attempt.steps and draft.step >= draft.spec.steps:
        return Trouble(STEPS_DONE, f"{draft.step} steps are done; spec.steps was lowered to {draft.spec.steps}.")
    return _late_start(draft, attempt) or _lost_pod(draft, attempt) or _silent_driver(draft)


def _late_start(draft: Draft, attempt: AttemptStatus) -> Trouble | None:
    """An attempt begins when its cluster is ready, so that queueing and pulling images are not in this time."""
    limit = draft.spec.timeouts.start_seconds
    late = seconds_since(attempt.start_time, draft.now) >= limit + DEADLINE_MARGIN_SECONDS
    if attempt.start_step is not None or not late:
        return None
    text = f"The driver was not ready within {limit:g} s of the cluster (spec.timeouts.startSeconds)"
    silent = draft.observed.submission_error or draft.observed.driver_error
    return Trouble(FailureReason.START_TIMEOUT, f"{text}; {silent}" if silent else f"{text}.")


def _lost_pod(draft: Draft, attempt: AttemptStatus) -> Trouble | None:
    trouble = pod_trouble(draft.observed, attempt)
    if trouble is None or attempt.notice_time is None:
        return None
    if draft.now - seconds_of(attempt.notice_time) < LOST_POD_SECONDS:
        return None
    return Trouble(attempt.reason or trouble.reason, attempt.message or trouble.message)


def _silent_driver(draft: Draft) -> Trouble | None:
    """The driver enforces its phases' deadlines; one that is silent for longer than any of them cannot any more."""
    since = draft.held_since(ConditionType.RUNNING, "Unknown")
    limit = longest_phase_seconds(draft.spec)
    if since is None or draft.driver is not None or draft.now - since < limit + DEADLINE_MARGIN_SECONDS:
        return None
    error = draft.observed.driver_error or draft.observed.submission_error or "no answer"
    text = f"The driver has not answered for {duration_text(draft.now - since)}, longer than any phase may take"
    return Trouble(FailureReason.PHASE_TIMEOUT, f"{text} (spec.timeouts): {error}")
