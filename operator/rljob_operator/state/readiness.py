"""Pods that have their nodes, and with them the devices, and never get ready."""

from __future__ import annotations

from rljob_api.spec import FailureReason
from rljob_api.status import AttemptStatus
from rljob_operator.state.attempts import AttemptOutcome, close_unstarted
from rljob_operator.state.causes import Cause, sentence
from rljob_operator.state.lifecycle import all_scheduled, is_whole
from rljob_operator.state.plan_builder import PlanBuilder
from rljob_operator.state.pod_causes import pod_problem
from rljob_operator.state.sandboxes import sandbox_problem
from rljob_operator.state.timing import duration_text, seconds_of, seconds_since, time_text


def give_up_unready(plan: PlanBuilder) -> AttemptOutcome | None:
    """Close an attempt that never began, because its pods were not ready in time; None while there is time."""
    if plan.attempt is not None:
        return None
    since, limit = plan.cluster_status.scheduled_time, plan.spec.timeouts.ready_seconds
    if plan.spec.suspend or seconds_since(since, plan.now) < limit:
        return None
    sandbox = sandbox_problem(plan.observed)
    problem = pod_problem(plan.observed, plan.spec)
    waiting = [pod.name for pod in plan.observed.pods if not pod.ready and not pod.deleting]
    if problem is None and not waiting and sandbox is not None:
        text = f"Sandboxes were not ready within {duration_text(limit)} of the pods having their nodes"
        cause = plan.observed.refused or sandbox
        said = sentence(f"{text} (spec.timeouts.readySeconds)", f"{cause.reason}: {cause.message}")
        return close_unstarted(plan, since, Cause(FailureReason.READY_TIMEOUT, said))
    text = f"Pods were not ready within {duration_text(limit)} of having their nodes (spec.timeouts.readySeconds)"
    also = problem.message if problem is not None else f"not ready: {', '.join(sorted(waiting)[:3])}" if waiting else ""
    return close_unstarted(plan, since, Cause(FailureReason.READY_TIMEOUT, sentence(text, also)))


def note_scheduled(plan: PlanBuilder) -> None:
    """Note since when every pod has its node; not while an attempt runs or any waits for one, nor once all is well.

    A pod that failed and is being made anew stops nothing: the others hold their devices meanwhile.
    """
    if plan.attempt is not None:
        return
    cluster, noted = plan.cluster, plan.cluster_status.scheduled_time
    if cluster is None or is_whole(plan) or cluster.suspended or _queues(plan):
        since = None
    elif noted is None and all_scheduled(plan):
        since = time_text(_scheduled_at(plan, plan.last_attempt))
    else:
        since = noted
    if since != noted:
        plan.set(cluster=plan.cluster_status.model_copy(update={"scheduled_time": since}))


def _queues(plan: PlanBuilder) -> bool:
    queue = plan.observed.queue
    waits = any(pod.unschedulable or pod.gated for pod in plan.observed.pods if not pod.deleting)
    return (waits and not all_scheduled(plan)) or (queue is not None and not queue.admitted)


def _scheduled_at(plan: PlanBuilder, last: AttemptStatus | None) -> float:
    """When the last pod got its node, or the last attempt ended: the operator may come to see either late."""
    times = [pod.scheduled for pod in plan.observed.pods if not pod.deleting]
    known = [time for time in times if time is not None]
    if not known or len(known) < len(times):
        return plan.now
    ended = [] if last is None or last.end_time is None else [seconds_of(last.end_time)]
    return min(plan.now, max([*known, *ended]))
