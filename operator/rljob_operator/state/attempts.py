"""One run of the driver: submitted once, followed, and closed with what is known of its end.

An attempt's number is stored before it is submitted, with the head it goes to. What Ray then answers says what
happened: the id is known (the attempt runs or ran), or it is not. In the second case the head is still the same one
and never confirmed the id, so that it is submitted again (Ray refuses an id twice); or the head is another one, and
with the old one went the driver.
"""

from __future__ import annotations

from enum import Enum, auto

from rljob_api.how_many import all_of, how_many
from rljob_api.spec import FailureAction, FailureReason
from rljob_api.status import AttemptStatus, Progress, RLJobStatus
from rljob_operator.state.causes import Cause
from rljob_operator.state.failures import backoff_seconds, decide, exit_failure, missing_pods, pod_failure
from rljob_operator.state.observed import SubmissionState
from rljob_operator.state.plan import Submit
from rljob_operator.state.plan_builder import PlanBuilder
from rljob_operator.state.progress import with_estimate
from rljob_operator.state.reasons import EndReason, caused, said_of
from rljob_operator.state.sandboxes import sandbox_problem
from rljob_operator.state.status_text import LINE_LIMIT, LINES_OF_EARLIER, LINES_OF_LAST, clean
from rljob_operator.state.timing import NOTICE_SECONDS, seconds_since, time_text

KEPT = 10
"""Attempts in the status, as its schema says."""
OTHER = "Other"
"""The reason of failed attempts of which none is known."""


class AttemptOutcome(Enum):
    """Consequences of the end of an attempt."""

    SUCCEED = auto()
    FAIL = auto()
    GO_ON = auto()
    """Another attempt, when `status.nextAttemptTime` is over; or suspension, when that is asked for."""


def submission_id(uid: str, attempt: int) -> str:
    """Id of an attempt's Ray job: submitting it again is harmless."""
    return f"rljob-{uid}-{attempt}"


def begin_attempt(plan: PlanBuilder) -> None:
    """Number a new attempt and submit it to the present head."""
    assert plan.head is not None, "a ready cluster has one head"
    assert plan.cluster is not None
    plan.set(cluster=plan.cluster_status.model_copy(update={"uid": plan.cluster.uid}))
    last = plan.last_attempt
    number = 0 if last is None else last.number + 1
    attempt = AttemptStatus(
        number=number,
        submission_id=submission_id(plan.job.uid, number),
        head_uid=plan.head.uid,
        session=_session(plan),
        steps=plan.spec.steps,
        start_time=time_text(plan.now),
    )
    _add(plan, attempt)
    plan.note("Normal", "Submitting", f"Attempt {number} is submitted to {plan.head.name}.")
    _submit(plan)


def note_acceptance(plan: PlanBuilder) -> None:
    """Note that Ray has confirmed the running attempt."""
    attempt, submission = plan.attempt, plan.submission
    known = submission is not None and submission.state is not SubmissionState.MISSING
    if attempt is not None and known and not attempt.accepted:
        plan.set_attempt(accepted=True, accept_time=time_text(plan.now))


def follow_attempt(plan: PlanBuilder) -> AttemptOutcome | None:
    """Take note of what became of the running attempt; tells what follows when it has ended."""
    attempt, submission = plan.attempt, plan.submission
    if attempt is None:
        return None
    _notice_failure(plan, attempt)
    if _cluster_is_gone(plan):
        default = Cause(FailureReason.HEAD_LOST, "Its RayCluster was deleted while the driver ran.")
        return _end(plan, _known_cause(plan, default))
    if submission is None:
        return None
    if submission.state.ended:
        return _ended(plan)
    if submission.state is SubmissionState.MISSING:
        return _missing(plan, attempt)
    return None


def submit_again(plan: PlanBuilder) -> None:
    """Repeat the submission of an attempt that Ray never got: the operator died, or the head did not answer."""
    attempt, submission = plan.attempt, plan.submission
    if attempt is None or attempt.accepted or attempt.stop_time is not None or plan.job.problem:
        return
    if sandbox_problem(plan.observed) is not None:
        return  # The manifest names their addresses.
    if submission is not None and submission.state is SubmissionState.MISSING:
        plan.set_attempt(session=attempt.session or _session(plan))
        _submit(plan)


def give_up_unsubmitted(plan: PlanBuilder) -> AttemptOutcome | None:
    """Close an attempt that is to be stopped and that Ray never got; None when there is something to stop."""
    attempt, submission = plan.attempt, plan.submission
    if attempt is None or attempt.stop_time is None or attempt.accepted:
        return None
    if submission is None or submission.state is not SubmissionState.MISSING:
        return None
    return _end(plan, _known_cause(plan, caused(EndReason.SUSPENDED)))


def close_unstarted(plan: PlanBuilder, began: str | None, cause: Cause) -> AttemptOutcome:
    """Number and close an attempt whose driver could not even be submitted, so that the failure policy judges it."""
    last = plan.last_attempt
    number = 0 if last is None else last.number + 1
    _add(plan, AttemptStatus(number=number, start_time=began))
    return _end(plan, cause)


def failed_attempts(status: RLJobStatus) -> dict[str, int]:
    """Number of attempts that failed for each reason and were followed by another.

    A status of an operator that did not count them has the reasons only of those that it lists; the others are
    `OTHER`.
    """
    if status.failed_attempts is not None:
        return dict(status.failed_attempts)
    counts: dict[str, int] = {}
    unlisted = (status.restarts or 0) - sum(attempt.counted for attempt in status.attempts)
    if unlisted > 0:
        counts[OTHER] = unlisted
    for attempt in status.attempts:
        if attempt.number < (status.attempt or 0):
            _count(counts, attempt)
    return counts


def _count(counts: dict[str, int], attempt: AttemptStatus) -> None:
    if attempt.reason not in (EndReason.SUSPENDED, EndReason.STEPS_RAISED):
        reason = attempt.reason or OTHER
        counts[reason] = counts.get(reason, 0) + 1


def _add(plan: PlanBuilder, attempt: AttemptStatus) -> None:
    last, counts = plan.last_attempt, failed_attempts(plan.status)
    if last is not None:
        _count(counts, last)
    listed = [*plan.status.attempts, attempt][-KEPT:]
    plan.set(attempts=listed, attempt=attempt.number, next_attempt_time=None, failed_attempts=counts)


def _session(plan: PlanBuilder) -> str | None:
    """The Ray session that answered, whichever attempt it was asked about."""
    return (plan.observed.submission.session or None) if plan.observed.submission is not None else None


def _submit(plan: PlanBuilder) -> None:
    attempt = plan.attempt
    assert attempt is not None
    assert attempt.submission_id is not None
    # A head that just did not answer would not take a submission either; the number is stored, so the next look does.
    actions = [] if plan.observed.submission_error else [Submit(attempt.submission_id, attempt.number)]
    plan.act(*actions, status_first=True)


def _notice_failure(plan: PlanBuilder, attempt: AttemptStatus) -> None:
    """Remember what is seen on the pods: KubeRay replaces them, and the driver's failure comes later."""
    cause = pod_failure(plan.observed, attempt, fatal=True)
    if attempt.stop_time is not None:
        return
    if cause is not None and (attempt.reason is None or _explains(cause, attempt)):
        plan.set_attempt(reason=cause.reason, message=clean(cause.message), notice_time=time_text(plan.now))
    elif attempt.reason is not None and cause is None and _is_over(attempt, plan.now):
        plan.set_attempt(reason=None, message=None, notice_time=None)


def _explains(cause: Cause, attempt: AttemptStatus) -> bool:
    """Whether a preemption is why pods were lost: their watch may be ahead of that of the cluster.

    `Evicted` is how operators before this reason called it.
    """
    lost = (FailureReason.HEAD_LOST, FailureReason.POD_LOST, FailureReason.EVICTED)
    return cause.reason == FailureReason.PREEMPTED and attempt.reason in lost


def _is_over(attempt: AttemptStatus, now: float) -> bool:
    return seconds_since(attempt.notice_time, now) > NOTICE_SECONDS


def _cluster_is_gone(plan: PlanBuilder) -> bool:
    """The attempt's RayCluster is no more, or the queue suspended it and the head's pod is gone."""
    own = plan.own_cluster
    if own is None or own.uid != plan.cluster_status.uid:
        return True
    return own.suspended and not plan.heads


def _missing(plan: PlanBuilder, attempt: AttemptStatus) -> AttemptOutcome | None:
    head, session = plan.head, _session(plan)
    if attempt.session and session:
        same = attempt.session == session
    else:
        same = head is not None and head.uid == attempt.head_uid
    if not attempt.accepted and same:
        return None
    default = Cause(FailureReason.HEAD_LOST, "Ray's head was started anew, and the driver ended with the old one.")
    return _end(plan, _known_cause(plan, default))


def _known_cause(plan: PlanBuilder, default: Cause) -> Cause:
    attempt = plan.attempt
    if attempt is not None and attempt.reason is not None:
        return Cause(attempt.reason, said_of(attempt.reason, attempt.message))
    return (pod_failure(plan.observed, attempt) if attempt is not None else None) or default


def _ended(plan: PlanBuilder) -> AttemptOutcome:
    submission, attempt = plan.submission, plan.attempt
    assert submission is not None
    assert attempt is not None
    if submission.state is not SubmissionState.SUCCEEDED:
        seen = pod_failure(plan.observed, attempt) or missing_pods(plan.observed)
        return _end(plan, exit_failure(submission, attempt, seen))
    early = plan.status.progress.stopped_early if plan.status.progress else None
    if early:
        return _end(plan, Cause(EndReason.COMPLETED, f"Stopped early after step {plan.step}: {early}"))
    given = attempt.steps if attempt.steps is not None else plan.spec.steps
    if given < plan.spec.steps:
        done = all_of(given, "step of the time is", "steps of the time are").capitalize()
        return _end(plan, _raised(plan, done))
    return _end(plan, Cause(EndReason.COMPLETED, f"{all_of(given, 'step is', 'steps are').capitalize()} done."))


def _raised(plan: PlanBuilder, done: str) -> Cause:
    return Cause(EndReason.STEPS_RAISED, f"{done} done; spec.steps is {plan.spec.steps} now.")


def _end(plan: PlanBuilder, cause: Cause) -> AttemptOutcome:
    attempt, submission = plan.attempt, plan.submission
    assert attempt is not None
    ended = submission is not None and submission.state.ended
    code = submission.exit_code if ended and submission is not None else None
    if cause.reason == EndReason.STEPS_DONE and plan.step < plan.spec.steps:
        # They were lowered, and raised again while it was asked to stop.
        cause = _raised(plan, how_many(plan.step, "step is", "steps are"))
    lines = submission.last_log_lines if ended and submission is not None else ()
    early = plan.status.progress.stopped_early if plan.status.progress else None
    if cause.reason == EndReason.COMPLETED and attempt.steps is not None and not early:
        # A quick job may end before its driver was ever reached, or before what it said could be written.
        known = plan.status.progress or Progress(steps=plan.spec.steps)
        plan.set(progress=with_estimate(known, max(plan.step, attempt.steps)))
    plan.set_attempt(
        end_time=time_text(plan.now),
        end_step=plan.step,
        reason=cause.reason,
        message=clean(cause.message),
        exit_code=None if code is None else max(-255, min(255, code)),
        last_log_lines=[clean(line, LINE_LIMIT) for line in lines[-LINES_OF_LAST:]],
    )
    *earlier, last = plan.status.attempts
    earlier = [a.model_copy(update={"last_log_lines": a.last_log_lines[-LINES_OF_EARLIER:]}) for a in earlier]
    plan.set(attempts=[*earlier, last])
    return _judge(plan, cause, code)


def _judge(plan: PlanBuilder, cause: Cause, code: int | None) -> AttemptOutcome:
    attempt = plan.last_attempt
    assert attempt is not None
    plan.end = (cause.reason, cause.message)
    if cause.reason in (EndReason.COMPLETED, EndReason.STEPS_DONE):
        return AttemptOutcome.SUCCEED
    if cause.reason == EndReason.DEADLINE:
        return AttemptOutcome.FAIL
    if cause.reason in (EndReason.SUSPENDED, EndReason.STEPS_RAISED):
        return AttemptOutcome.GO_ON
    text = f"Attempt {attempt.number} ended ({cause.reason}): {cause.message}"
    if plan.spec.suspend:
        plan.note("Warning", "AttemptEnded", text)
        return AttemptOutcome.GO_ON
    decision = decide(plan.spec.failure_policy, cause, code, attempt.stop_time is not None)
    restarts, most = plan.status.restarts or 0, plan.spec.failure_policy.max_restarts
    if decision.action is FailureAction.FAIL:
        plan.end = (cause.reason, f"{text} The job fails, because {decision.because}.")
        return AttemptOutcome.FAIL
    if decision.action is FailureAction.RESTART and restarts >= most:
        used = (
            "spec.failurePolicy.maxRestarts is 0" if not most else f"{all_of(most, 'restart is', 'restarts are')} used"
        )
        plan.end = (cause.reason, f"{text} The job fails, because {used}.")
        return AttemptOutcome.FAIL
    _restart(plan, decision.action is FailureAction.RESTART, text)
    return AttemptOutcome.GO_ON


def _restart(plan: PlanBuilder, counted: bool, text: str) -> None:
    wait = backoff_seconds(plan.spec.failure_policy, plan.status.attempts)
    at = time_text(plan.now + wait)
    if counted:
        plan.set_attempt(counted=True)
        plan.set(restarts=(plan.status.restarts or 0) + 1)
    plan.set(next_attempt_time=at)
    plan.note("Warning", "AttemptEnded", f"{text} The next attempt begins after {at}.")
