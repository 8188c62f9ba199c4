"""Why an attempt failed, and what the failure policy makes of it."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from rljob_api import derived
from rljob_api.spec import FailureAction, FailurePolicy, FailureReason
from rljob_api.status import AttemptStatus
from rljob_api.wire.exit_codes import ExitCode
from rljob_operator.state.causes import Cause, cut, sentence
from rljob_operator.state.hccl_errors import hccl_error
from rljob_operator.state.observed import Observed, PodRole, PodView, SubmissionState, SubmissionView
from rljob_operator.state.pod_ends import pod_end
from rljob_operator.state.reasons import FACTS, EndReason, caused, facts_of, said_of, severity
from rljob_operator.state.scaling import spare_pods
from rljob_operator.state.timing import seconds_of

_KILLED = 128


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision of the failure policy on an attempt that failed."""

    action: FailureAction
    because: str
    """The rule or the default that decided, in words."""


def pod_failure(observed: Observed, attempt: AttemptStatus, *, fatal: bool = False) -> Cause | None:
    """The worst thing that is seen on the attempt's pods and kills what ran in them; None when all look well.

    Pods that were replaced may still be on their way out (on a lost node for ever): they are none of it. A worker that
    died or was deleted while the attempt ran is, even where its pod was replaced at once.

    Args:
        observed: what is known.
        attempt: the running one.
        fatal: without pods whose engines others go on without.
    """
    spec = observed.job.spec
    if fatal and spec is not None and derived.may_lose_engines(spec):
        observed = _without_engines(observed)
    cluster = observed.cluster
    if cluster is not None and cluster.suspended:
        return caused(FailureReason.PREEMPTED)
    heads = [pod for pod in observed.pods if pod.role is PodRole.HEAD]
    if all(pod.uid != attempt.head_uid for pod in heads):
        return caused(FailureReason.HEAD_LOST)
    workers = [pod for pod in observed.pods if pod.role is PodRole.WORKER]
    well = [pod for pod in workers if pod.ready and not pod.deleting and not pod.node_lost]
    complete = cluster is not None and len(well) >= cluster.desired_workers - spare_pods(observed)
    began = seconds_of(attempt.start_time) if attempt.start_time is not None else 0.0
    gone = [replace(gone.pod, deleting=True) for gone in observed.gone_pods if gone.time >= began]
    concerned = [pod for pod in heads if pod.uid == attempt.head_uid] + gone + ([] if complete else workers)
    found = [cause for pod in concerned if (cause := _failure_of(pod))]
    return min(found, key=severity, default=None)


def _without_engines(observed: Observed) -> Observed:
    """The same of the trainers' pods alone."""
    cluster, spec = observed.cluster, observed.job.spec
    assert spec is not None
    trainers = derived.trainer_nodes(spec)
    return replace(
        observed,
        cluster=None if cluster is None else replace(cluster, desired_workers=trainers, engine_group=None),
        pods=tuple(pod for pod in observed.pods if pod.group != derived.ENGINE_GROUP),
        gone_pods=tuple(gone for gone in observed.gone_pods if gone.pod.group != derived.ENGINE_GROUP),
    )


def missing_pods(observed: Observed) -> Cause | None:
    """Cause of a driver's failure, where the evidence on the lost pod was deleted with it."""
    cluster = observed.cluster
    if cluster is None:
        return None
    workers = [pod for pod in observed.pods if pod.role is PodRole.WORKER and pod.ready and not pod.deleting]
    if len(workers) >= cluster.desired_workers - spare_pods(observed):
        return None
    text = f"Only {len(workers)} of {cluster.desired_workers} worker pods were ready when the driver ended."
    return Cause(FailureReason.POD_LOST, text)


def _failure_of(pod: PodView) -> Cause | None:
    end = pod_end(pod)
    name = f"{'Head' if pod.role is PodRole.HEAD else 'Worker'} pod {pod.name}"
    return None if end is None else Cause(end.reason, f"{name} {end.message}")


def exit_failure(submission: SubmissionView, attempt: AttemptStatus, seen: Cause | None) -> Cause:
    """Why an attempt ended that Ray says has ended, and not with success.

    What was seen on the pods, now or while the driver still ran, explains a failure better than the exit code, which
    then is only its echo. A user error is the user's whatever else happened.
    """
    code = submission.exit_code
    last = next((line.strip() for line in reversed(submission.last_log_lines) if line.strip()), "")
    echo = f"its last line: {cut(last, 300)}" if last else cut(submission.message, 300)
    if code == ExitCode.USER_ERROR:
        return caused(EndReason.USER_ERROR, echo)
    obeyed = code in (None, ExitCode.STOPPED)
    if attempt.reason is not None and (obeyed or attempt.reason != EndReason.STEPS_DONE):
        also = "" if obeyed else f"the driver {_ended_how(code)}"
        return Cause(attempt.reason, sentence(said_of(attempt.reason, attempt.message), also))
    if seen is not None:
        return seen
    if code == ExitCode.STOPPED or submission.state is SubmissionState.STOPPED:
        return caused(EndReason.STOPPED)
    if code == ExitCode.DEADLINE:
        return caused(FailureReason.PHASE_TIMEOUT, echo)
    how = f"The driver {_ended_how(code)}"
    hccl = hccl_error(submission.last_log_lines)
    if hccl is not None:
        return Cause(hccl.reason, sentence(hccl.message, f"{how[:1].lower()}{how[1:]}"))
    return Cause(FailureReason.DRIVER_EXITED, sentence(how, echo))


def _ended_how(code: int | None) -> str:
    if code is None:
        return "ended without an exit code"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    return f"was killed by {name}"


def decide(policy: FailurePolicy, cause: Cause, exit_code: int | None, asked_to_stop: bool) -> Decision:
    """Apply the failure policy: the first rule that matches, else the default of the reason.

    The defaults: a user error fails the job, since the next attempt would meet it again. A driver that someone else
    stopped (exit code 75 or Ray's STOPPED, and the operator had not asked) goes on without being counted: it has saved
    its state and nothing is broken. A preemption by the queue is not counted either. Anything else is restarted.

    Args:
        policy: `spec.failurePolicy`.
        cause: why the attempt ended.
        exit_code: of the driver; negative for a signal, which rules see as 128 and the signal's number, as shells do.
        asked_to_stop: the operator stopped it because of `cause`.
    """
    code = exit_code if exit_code is None or exit_code >= 0 else _KILLED - exit_code
    facts = facts_of(cause.reason)
    for i, rule in enumerate(policy.rules):
        if rule.exit_codes and code not in rule.exit_codes:
            continue
        if rule.reasons and cause.reason not in rule.reasons and facts.kind_of not in rule.reasons:
            continue
        return Decision(rule.action, f"rule {rule.name or i} of spec.failurePolicy.rules says {rule.action}")
    if exit_code == ExitCode.STOPPED and not asked_to_stop:
        facts = FACTS[EndReason.STOPPED]
    return Decision(facts.action, facts.because)


def backoff_seconds(policy: FailurePolicy, attempts: list[AttemptStatus]) -> float:
    """Seconds to wait before the next attempt: doubled for each attempt in a row that completed no step."""
    fruitless = 0
    for attempt in reversed(attempts):
        if (
            attempt.end_step is not None
            and attempt.end_step > (attempt.start_step or 0)
            and attempt.start_step is not None
        ):
            break
        fruitless += 1
    return float(min(policy.backoff_seconds * 2.0 ** max(fruitless - 1, 0), policy.max_backoff_seconds))
