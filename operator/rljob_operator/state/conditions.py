"""Conditions: what is observed, with a reason in one word and a message in a sentence."""

from __future__ import annotations

from dataclasses import replace

from rljob_api.how_many import how_many
from rljob_api.status import ClusterStatus, ConditionType, JobPhase
from rljob_api.wire.names import DASHBOARD_PORT
from rljob_operator.state.causes import cut, sentence
from rljob_operator.state.explain import explain
from rljob_operator.state.lifecycle import problem_text
from rljob_operator.state.plan import OBJECTS, CreateCluster
from rljob_operator.state.plan_builder import FINAL, PlanBuilder
from rljob_operator.state.reasons import EndReason, said_of
from rljob_operator.state.release import former_head_ends
from rljob_operator.state.sandboxes import lost_sandbox
from rljob_operator.state.status_text import clean, reason_word
from rljob_operator.state.timing import FRESHNESS_SECONDS, SILENCE_SECONDS, seconds_since

_COMING_UP = {
    "ClusterMissing": "Scheduling",
    "ClusterNotSeen": "Scheduling",
    "ClusterDeleting": "Scheduling",
    "PodsMissing": "Scheduling",
    "PodsStarting": "PodsStarting",
    "ClusterStarting": "PodsStarting",
    "NotSubmitted": "DriverStarting",
    "DriverPending": "DriverStarting",
    "DriverStarting": "DriverStarting",
    "Starting": "DriverStarting",
}
_COMING_UP_TEXTS = {
    "Scheduling": "The RayCluster is asked for; its pods are being made and get their nodes.",
    "PodsStarting": "The pods have their nodes and start.",
    "DriverStarting": "The cluster is ready; the driver starts its trainers and engines.",
}
"""Stages that every job passes get one text each: a status write for each pod that comes up would be too many."""
_LONGEST = 900
"""Characters of each of two texts that share the status's message."""


def record_cluster(plan: PlanBuilder) -> None:
    """Note which RayCluster the job has."""
    old, cluster, head = plan.cluster_status, plan.own_cluster, plan.head
    if cluster is None:
        released = old.released_uid
        plan.set(cluster=ClusterStatus(released_uid=released) if released else None)
        return
    service, driver = cluster.head_service, plan.driver
    said = driver.engine_nodes if driver is not None else None
    kept = old.engine_nodes if plan.attempt is not None else None
    plan.set(
        cluster=ClusterStatus(
            name=cluster.name,
            # The attempt that runs belongs to the cluster that was noted when it began.
            uid=old.uid if plan.attempt is not None and old.uid else cluster.uid,
            head_pod=head.name if head is not None else None,
            dashboard=f"http://{service}.{plan.job.namespace}.svc:{DASHBOARD_PORT}" if service else None,
            ready_workers=max(0, cluster.ready_workers),
            engine_nodes=kept if said is None else said.taking_part,
            released_uid=old.released_uid,
            scheduled_time=old.scheduled_time,
        )
    )


def set_conditions(plan: PlanBuilder, phase: JobPhase) -> None:
    """Set all conditions for the phase, and the status's message."""
    reason, message = _why(plan, phase)
    _queued(plan, phase, reason, message)
    _cluster_ready(plan, phase, reason, message)
    _running(plan, phase, reason, message)
    _suspended(plan, phase, message)
    if phase in FINAL:
        plan.set_condition(ConditionType(phase), "True", reason, message)
    plan.set(message=_with_problem(plan, message) or None)


def _with_problem(plan: PlanBuilder, message: str) -> str:
    """The message, what has no effect, and why nothing follows where the spec does not render any more while an attempt
    runs."""
    if plan.job.remark:
        message = f"{clean(message, _LONGEST)} {plan.job.remark}"
    if not plan.job.problem or plan.attempt is None:
        return clean(message)
    return f"{clean(message, _LONGEST)} No other attempt can be begun: {clean(problem_text(plan), _LONGEST)}"


def _why(plan: PlanBuilder, phase: JobPhase) -> tuple[str, str]:
    attempt = plan.attempt
    if phase in FINAL:
        reason, message = plan.end
        return reason_word(reason, str(phase)), message
    if phase is JobPhase.SUSPENDED:
        left = len(plan.observed.pods)
        pods = f"; {left} of its pods still end" if left else ""
        return "Suspended", f"spec.suspend is true; the devices are given back{pods}."
    if attempt is not None and attempt.stop_time is not None:
        text = said_of(attempt.reason or EndReason.STOPPED, attempt.message)
        return "Stopping", f"The driver is asked to stop: {text}"
    if plan.spec.suspend:
        return "Suspending", "spec.suspend is true; the devices are being given back."
    if phase is JobPhase.RUNNING:
        return _why_running(plan)
    return _why_not_running(plan, phase)


def _why_running(plan: PlanBuilder) -> tuple[str, str]:
    progress = plan.status.progress
    heard = progress.last_update_time if progress is not None else None
    lost = lost_sandbox(plan.observed)
    sandbox = "" if lost is None else lost[1].message
    if plan.driver is None and seconds_since(heard, plan.now) >= FRESHNESS_SECONDS + SILENCE_SECONDS:
        error = plan.observed.driver_error or plan.observed.submission_error or "nothing was heard of it"
        text = f"The driver has not answered since about {heard}: {error}"
        return "DriverUnreachable", sentence(text, sandbox) if sandbox else text
    unread = plan.driver.records_error if plan.driver is not None else ""
    also = f"its step records cannot be read: {cut(unread, 300)}" if unread else ""
    return "DriverReady", sentence(f"{plan.step} of {plan.spec.steps} steps are done", also, sandbox)


def _why_not_running(plan: PlanBuilder, phase: JobPhase) -> tuple[str, str]:
    attempt = plan.attempt
    needed = [action for action in plan.actions if isinstance(action, OBJECTS)]
    refused = plan.observed.refused if needed else None
    if refused is None and any(isinstance(action, CreateCluster) for action in needed):
        return "Scheduling", _COMING_UP_TEXTS["Scheduling"]
    if attempt is not None and attempt.reason is not None:
        return reason_word(attempt.reason, "Failing"), said_of(attempt.reason, attempt.message)
    if plan.job.problem and attempt is None:
        return "InvalidSpec", problem_text(plan)
    if plan.status.next_attempt_time is not None and plan.last_attempt is not None:
        last = plan.last_attempt
        text = f"Attempt {last.number} ended ({last.reason}): {last.message}"
        return "BackOff", f"{text} The next one begins after {plan.status.next_attempt_time}."
    if former_head_ends(plan) and plan.head is not None:
        return "FormerHeadEnds", "The former head pod is still ending; the next attempt waits for it."
    status = plan.status.model_copy(update={"phase": phase})
    job = replace(plan.job, problem="", status=status)
    found = explain(replace(plan.observed, job=job, refused=refused), plan.now)
    stage = _COMING_UP.get(found.reason)
    if stage is not None:
        return stage, _COMING_UP_TEXTS[stage]
    return reason_word(found.reason, str(phase)), found.message


def _queued(plan: PlanBuilder, phase: JobPhase, reason: str, message: str) -> None:
    kind = ConditionType.QUEUED
    if phase is JobPhase.QUEUED:
        plan.set_condition(kind, "True", reason, message)
    elif phase is JobPhase.PENDING:
        plan.set_condition(kind, "False", reason, message)
    elif phase in (JobPhase.STARTING, JobPhase.RUNNING):
        plan.set_condition(kind, "False", "Admitted", "The job has its devices.")
    else:
        plan.set_condition(kind, "False", str(phase), "The job asks for no devices.")


def _cluster_ready(plan: PlanBuilder, phase: JobPhase, reason: str, message: str) -> None:
    kind, cluster = ConditionType.CLUSTER_READY, plan.cluster
    if phase in (*FINAL, JobPhase.SUSPENDED):
        plan.set_condition(kind, "False", "Released", "The devices were given back.")
    elif plan.name_taken:
        plan.set_condition(kind, "False", "ClusterNameTaken", message)
    elif cluster is None:
        plan.set_condition(kind, "False", "NoCluster", "There is no RayCluster of this job.")
    elif cluster.ready:
        plan.set_condition(
            kind, "True", "AllPodsReady", f"The head and {how_many(cluster.ready_workers, 'worker')} are ready."
        )
    else:
        running = phase is JobPhase.RUNNING
        text = "Not all pods of the RayCluster are ready." if running else message
        plan.set_condition(kind, "False", "PodsNotReady" if running else reason, text)


def _running(plan: PlanBuilder, phase: JobPhase, reason: str, message: str) -> None:
    kind = ConditionType.RUNNING
    if phase is not JobPhase.RUNNING:
        plan.set_condition(kind, "False", reason, message)
    elif reason == "DriverUnreachable":
        plan.set_condition(kind, "Unknown", reason, message)
    elif plan.driver is not None or plan.condition(kind) is None:
        plan.set_condition(kind, "True", reason, message)


def _suspended(plan: PlanBuilder, phase: JobPhase, message: str) -> None:
    kind = ConditionType.SUSPENDED
    if phase is JobPhase.SUSPENDED:
        plan.set_condition(kind, "True", "Suspended", message)
    elif phase not in FINAL and plan.spec.suspend:
        plan.set_condition(kind, "False", "Suspending", message)
    elif plan.condition(kind) is not None:
        plan.set_condition(kind, "False", "NotSuspended", "The job is not suspended.")
