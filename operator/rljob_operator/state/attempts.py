"""One run of the driver: submitted once, followed, and closed with what is known of its end.

An attempt's number is stored before it is submitted, with the head it goes to. What Ray then answers says what
happened: it knows the id (the attempt runs or ran), or it does not. In the second case the head is still the same one
and never confirmed the id, so that it is submitted again (Ray refuses an id twice); or the head is another one, and
with the old one went the driver.
"""

from __future__ import annotations

from enum import Enum, auto

from rljob_api.spec import FailureAction, FailureReason
from rljob_api.status import AttemptStatus, Progress
from rljob_operator.state.draft import ENDED, Draft
from rljob_operator.state.failures import (
    COMPLETED,
    DEADLINE,
    PREEMPTION,
    STEPS_DONE,
    STEPS_RAISED,
    SUSPENDED,
    Trouble,
    backoff_seconds,
    decide,
    exit_trouble,
    missing_pods,
    pod_trouble,
)
from rljob_operator.state.observed import SubmissionState
from rljob_operator.state.plan import Submit
from rljob_operator.state.progress import with_estimate
from rljob_operator.state.texts import LINE_LIMIT, LINES_OF_EARLIER, LINES_OF_LAST, clean
from rljob_operator.state.timing import NOTICE_SECONDS, seconds_since, time_text

KEPT = 10
"""Attempts in the status, as its schema says."""


class Verdict(Enum):
    """What follows from the end of an attempt."""

    SUCCEED = auto()
    FAIL = auto()
    GO_ON = auto()
    """Another attempt, when `status.nextAttemptTime` is over; or suspension, when that is asked for."""


def submission_id(uid: str, attempt: int) -> str:
    """Id of an attempt's Ray job: submitting it again is harmless."""
    return f"rljob-{uid}-{attempt}"


def begin_attempt(draft: Draft) -> None:
    """Number a new attempt and submit it to the present head."""
    assert draft.head is not None, "a ready cluster has one head"
    assert draft.cluster is not None
    draft.set(cluster=draft.cluster_status.model_copy(update={"uid": draft.cluster.uid}))
    last = draft.last_attempt
    number = 0 if last is None else last.number + 1
    attempt = AttemptStatus(
        number=number,
        submission_id=submission_id(draft.job.uid, number),
        head_uid=draft.head.uid,
        session=_session(draft),
        steps=draft.spec.steps,
        start_time=time_text(draft.now),
    )
    draft.set(attempts=[*draft.status.attempts, attempt][-KEPT:], attempt=number, next_attempt_time=None)
    draft.note("Normal", "Submitting", f"Attempt {number} is submitted to {draft.head.name}.")
    _submit(draft)


def note_acceptance(draft: Draft) -> None:
    """Note that Ray knows the running attempt."""
    attempt, submission = draft.attempt, draft.submission
    known = submission is not None and submission.state is not SubmissionState.MISSING
    if attempt is not None and known and not attempt.accepted:
        draft.set_attempt(accepted=True)


def follow_attempt(draft: Draft) -> Verdict | None:
    """Take note of what became of the running attempt; tells what follows when it has ended."""
    attempt, submission = draft.attempt, draft.submission
    if attempt is None:
        return None
    _notice_trouble(draft, attempt)
    if _cluster_is_gone(draft):
        default = Trouble(FailureReason.HEAD_LOST, "Its RayCluster was deleted while the driver ran.")
        return _end(draft, _known_trouble(draft, default))
    if submission is None:
        return None
    if submission.state in ENDED:
        return _ended(draft)
    if submission.state is SubmissionState.MISSING:
        return _missing(draft, attempt)
    return None


def submit_again(draft: Draft) -> None:
    """Repeat the submission of an attempt that Ray never got: the operator died, or the head did not answer."""
    attempt, submission = draft.attempt, draft.submission
    if attempt is None or attempt.accepted or attempt.stop_time is not None or draft.job.problem:
        return
    if submission is not None and submission.state is SubmissionState.MISSING:
        draft.set_attempt(session=attempt.session or _session(draft))
        _submit(draft)


def give_up_unsubmitted(draft: Draft) -> Verdict | None:
    """Close an attempt that is to be stopped and that Ray never got; None when there is something to stop."""
    attempt, submission = draft.attempt, draft.submission
    if attempt is None or attempt.stop_time is None or attempt.accepted:
        return None
    if submission is None or submission.state is not SubmissionState.MISSING:
        return None
    return _end(draft, _known_trouble(draft, Trouble(SUSPENDED, "")))


def _session(draft: Draft) -> str | None:
    """The Ray session that answered, whichever attempt it was asked about."""
    return (draft.observed.submission.session or None) if draft.observed.submission is not None else None


def _submit(draft: Draft) -> None:
    attempt = draft.attempt
    assert attempt is not None
    assert attempt.submission_id is not None
    # A head that just did not answer would not take a submission either; the number is stored, so the next look does.
    actions = [] if draft.observed.submission_error else [Submit(attempt.submission_id, attempt.number)]
    draft.act(*actions, status_first=True)


def _notice_trouble(draft: Draft, attempt: AttemptStatus) -> None:
    """Remember what is seen on the pods: KubeRay replaces them, and the driver's failure comes later."""
    trouble = pod_trouble(draft.observed, attempt)
    if attempt.stop_time is not None:
        return
    if trouble is not None and (attempt.reason is None or _explains(trouble, attempt)):
        draft.set_attempt(reason=trouble.reason, message=clean(trouble.message), notice_time=time_text(draft.now))
    elif attempt.reason is not None and trouble is None and _is_over(attempt, draft.now):
        draft.set_attempt(reason=None, message=None, notice_time=None)


def _explains(trouble: Trouble, attempt: AttemptStatus) -> bool:
    """Whether a preemption is why pods were lost: their watch may be ahead of that of the cluster."""
    return trouble.message == PREEMPTION and attempt.reason in (FailureReason.HEAD_LOST, FailureReason.POD_LOST)


def _is_over(attempt: AttemptStatus, now: float) -> bool:
    return seconds_since(attempt.notice_time, now) > NOTICE_SECONDS


def _cluster_is_gone(draft: Draft) -> bool:
    """The attempt's RayCluster is no more, or the queue suspended it and the head's pod is gone."""
    own = draft.own_cluster
    if own is None or own.uid != draft.cluster_status.uid:
        return True
    return own.suspended and not draft.heads


def _missing(draft: Draft, attempt: AttemptStatus) -> Verdict | None:
    head, session = draft.head, _session(draft)
    if attempt.session and session:
        same = attempt.session == session
    else:
        same = head is not None and head.uid == attempt.head_uid
    if not attempt.accepted and same:
        return None
    default = Trouble(FailureReason.HEAD_LOST, "Ray's head was started anew, and the driver ended with the old one.")
    return _end(draft, _known_trouble(draft, default))


def _known_trouble(draft: Draft, default: Trouble) -> Trouble:
    attempt = draft.attempt
    if attempt is not None and attempt.reason is not None:
        return Trouble(attempt.reason, attempt.message or "")
    return (pod_trouble(draft.observed, attempt) if attempt is not None else None) or default


def _ended(draft: Draft) -> Verdict:
    submission, attempt = draft.submission, draft.attempt
    assert submission is not None
    assert attempt is not None
    if submission.state is not SubmissionState.SUCCEEDED:
        seen = pod_trouble(draft.observed, attempt) or missing_pods(draft.observed)
        return _end(draft, exit_trouble(submission, attempt, seen))
    given = attempt.steps if attempt.steps is not None else draft.spec.steps
    if given < draft.spec.steps:
        message = f"All {given} steps of the time are done; spec.steps is {draft.spec.steps} now."
        return _end(draft, Trouble(STEPS_RAISED, message))
    return _end(draft, Trouble(COMPLETED, f"All {given} steps are done."))


def _end(draft: Draft, trouble: Trouble) -> Verdict:
    attempt, submission = draft.attempt, draft.submission
    assert attempt is not None
    ended = submission is not None and submission.state in ENDED
    code = submission.exit_code if ended and submission is not None else None
    lines = submission.last_log_lines if ended and submission is not None else ()
    if trouble.reason == COMPLETED and attempt.steps is not None:
        # A quick job may end before its driver was ever reached, or before what it said could be written.
        known = draft.status.progress or Progress(steps=draft.spec.steps)
        draft.set(progress=with_estimate(known, max(draft.step, attempt.steps)))
    draft.set_attempt(
        end_time=time_text(draft.now),
        end_step=draft.step,
        reason=trouble.reason,
        message=clean(trouble.message),
        exit_code=None if code is None else max(-255, min(255, code)),
        last_log_lines=[clean(line, LINE_LIMIT) for line in lines[-LINES_OF_LAST:]],
    )
    *earlier, last = draft.status.attempts
    earlier = [a.model_copy(update={"last_log_lines": a.last_log_lines[-LINES_OF_EARLIER:]}) for a in earlier]
    draft.set(attempts=[*earlier, last])
    return _judge(draft, trouble, code)


def _judge(draft: Draft, trouble: Trouble, code: int | None) -> Verdict:
    attempt = draft.last_attempt
    assert attempt is not None
    draft.end = (trouble.reason, trouble.message)
    if trouble.reason in (COMPLETED, STEPS_DONE):
        return Verdict.SUCCEED
    if trouble.reason == DEADLINE:
        return Verdict.FAIL
    if trouble.reason in (SUSPENDED, STEPS_RAISED):
        return Verdict.GO_ON
    text = f"Attempt {attempt.number} ended ({trouble.reason}): {trouble.message}"
    if draft.spec.suspend:
        draft.note("Warning", "AttemptEnded", text)
        return Verdict.GO_ON
    decision = decide(draft.spec.failure_policy, trouble, code, attempt.stop_time is not None)
    restarts, most = draft.status.restarts or 0, draft.spec.failure_policy.max_restarts
    if decision.action is FailureAction.FAIL:
        draft.end = (trouble.reason, f"{text} The job fails, because {decision.because}.")
        return Verdict.FAIL
    if decision.action is FailureAction.RESTART and restarts >= most:
        used = "spec.failurePolicy.maxRestarts is 0" if not most else f"all {most} restarts are used"
        draft.end = (trouble.reason, f"{text} The job fails, because {used}.")
        return Verdict.FAIL
    _restart(draft, decision.action is FailureAction.RESTART, text)
    return Verdict.GO_ON


def _restart(draft: Draft, counted: bool, text: str) -> None:
    wait = backoff_seconds(draft.spec.failure_policy, draft.status.attempts)
    at = time_text(draft.now + wait)
    if counted:
        draft.set_attempt(counted=True)
        draft.set(restarts=(draft.status.restarts or 0) + 1)
    draft.set(next_attempt_time=at)
    draft.note("Warning", "AttemptEnded", f"{text} The next attempt begins after {at}.")
