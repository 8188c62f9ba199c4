"""Actions for one job from its observed state: `reconcile(observed, now) -> Plan`.

Pure and level-triggered: it may be called at any time, any number of times, with observations that lag behind, and by
an operator that died between any two actions. What must be remembered stands in the status; what must not happen twice
is stored there before it is done (`Plan.status_first`).

| phase | means | leaves it when |
|---|---|---|
| Pending | the spec is invalid, or something else has the name | that is corrected |
| Queued | devices are asked for | every pod has its node |
| Starting | devices are held, no driver is ready | the driver is ready |
| Running | the driver is ready | it ends, or is lost |
| Suspended | `spec.suspend`; the devices are given back | `spec.suspend` is false |
| Succeeded, Failed | final | the TTL is over |
"""

from __future__ import annotations

from rljob_api.status import ConditionType, JobPhase, Progress, RLJobStatus
from rljob_operator.state.attempts import AttemptOutcome, follow_attempt, give_up_unsubmitted, note_acceptance
from rljob_operator.state.checkpoints import request_checkpoint
from rljob_operator.state.conditions import record_cluster, set_conditions
from rljob_operator.state.deadlines import stop_what_must_end
from rljob_operator.state.goodput import count_steps, settle
from rljob_operator.state.lifecycle import advance, begin_status, finish, keep_policy, problem_text, retire
from rljob_operator.state.observed import Observed
from rljob_operator.state.plan import Plan
from rljob_operator.state.plan_builder import FINAL, PlanBuilder
from rljob_operator.state.preemption import tell_cost
from rljob_operator.state.progress import read_progress
from rljob_operator.state.readiness import give_up_unready, note_scheduled
from rljob_operator.state.sandboxes import lost_sandbox, may_hold_sandboxes, sandbox_problem
from rljob_operator.state.scaling import scale_engines
from rljob_operator.state.timing import (
    RUNNING_LOOK_SECONDS,
    STARTING_LOOK_SECONDS,
    WAITING_LOOK_SECONDS,
    seconds_of,
    seconds_since,
)

_COMPARED = 200
"""Number of characters of a spec's problem that identify it where it is reported beside something else."""


def reconcile(observed: Observed, now: float) -> Plan:
    """Return what the job needs now.

    Args:
        observed: everything that is known; its parts may be of different age.
        now: Unix seconds.
    """
    plan = PlanBuilder(observed, now)
    if observed.job.deleting:
        return Plan(status=plan.old, urgent=False)
    if plan.finished:
        return _planned(plan, retire(plan))
    if observed.job.spec is None or (observed.job.problem and not _begun(plan)):
        return _refuse(plan)
    begin_status(plan)
    note_acceptance(plan)
    count_steps(plan)
    read_progress(plan)
    outcome = follow_attempt(plan)
    if outcome is None:
        stop_what_must_end(plan)
        outcome = give_up_unsubmitted(plan)
    if outcome in (None, AttemptOutcome.GO_ON):
        note_scheduled(plan)
    outcome = outcome or give_up_unready(plan)
    phase = _next_phase(plan, outcome)
    keep_policy(plan)
    request_checkpoint(plan)
    scale_engines(plan)
    tell_cost(plan, phase)
    record_cluster(plan)
    settle(plan, phase)
    set_conditions(plan, phase)
    _announce(plan, phase)
    return _planned(plan, _next_reconcile(plan, phase))


def _next_phase(plan: PlanBuilder, outcome: AttemptOutcome | None) -> JobPhase:
    match outcome:
        case AttemptOutcome.SUCCEED:
            phase = JobPhase.SUCCEEDED
        case AttemptOutcome.FAIL:
            phase = JobPhase.FAILED
        case _:
            phase = advance(plan)
    if phase in FINAL:
        finish(plan)
    return phase


def _begun(plan: PlanBuilder) -> bool:
    """Whether anything was done for the job: then it is cared for to its end, even if its spec renders no more."""
    return plan.old.start_time is not None or plan.own_cluster is not None


def _refuse(plan: PlanBuilder) -> Plan:
    """A spec that cannot be read, or never was rendered: nothing is begun, and nothing that runs is touched."""
    text = problem_text(plan)
    if plan.old.message != text:
        plan.note("Warning", "InvalidSpec", text)
    if plan.own_cluster is None and plan.attempt is None:
        settle(plan, JobPhase.PENDING)
        plan.set_condition(ConditionType.QUEUED, "False", "InvalidSpec", text)
    plan.set(observed_generation=plan.job.generation, message=text)
    return _planned(plan, None)


def _announce(plan: PlanBuilder, phase: JobPhase) -> None:
    if plan.job.remark and plan.job.remark not in (plan.old.message or ""):
        plan.note("Warning", "NoEffect", plan.job.remark)
    if plan.job.problem:
        text = problem_text(plan)
        said, before = plan.status.message or "", plan.old.message or ""
        if text[:_COMPARED] in said and text[:_COMPARED] not in before:
            plan.note("Warning", "InvalidSpec", text)
    lost = lost_sandbox(plan.observed) if phase is JobPhase.RUNNING else None
    # By the claim alone: what is said of it changes while its sandbox ends.
    text = "" if lost is None else f"SandboxClaim {lost[0]} "
    if lost is not None and text in (plan.status.message or "") and text not in (plan.old.message or ""):
        plan.note("Warning", "SandboxLost", lost[1].message)
    if phase is not plan.old.phase:
        plan.note("Warning" if phase is JobPhase.FAILED else "Normal", str(phase), plan.status.message or str(phase))


def _next_reconcile(plan: PlanBuilder, phase: JobPhase) -> float | None:
    attempt, now = plan.attempt, plan.now
    holds = plan.own_cluster is not None or may_hold_sandboxes(plan.observed)
    if phase in (*FINAL, JobPhase.SUSPENDED, JobPhase.PENDING) and holds:
        return WAITING_LOOK_SECONDS
    if phase in FINAL:
        ttl = plan.spec.ttl_seconds_after_finished
        return None if ttl is None else float(ttl)
    if phase is JobPhase.SUSPENDED or (phase is JobPhase.PENDING and plan.job.problem and not plan.name_taken):
        return None
    if attempt is not None:
        starts = phase is JobPhase.STARTING and seconds_since(attempt.start_time, now) < WAITING_LOOK_SECONDS
        return STARTING_LOOK_SECONDS if starts else RUNNING_LOOK_SECONDS
    longest = _sandbox_look(plan) if phase is JobPhase.STARTING else WAITING_LOOK_SECONDS
    if plan.status.next_attempt_time is not None:
        return min(longest, max(1.0, seconds_of(plan.status.next_attempt_time) - now))
    return longest


def _sandbox_look(plan: PlanBuilder) -> float:
    """Seconds until a job that has its nodes is looked at again: no watch reports its sandboxes."""
    if sandbox_problem(plan.observed) is None or plan.job.problem:
        return WAITING_LOOK_SECONDS
    waited = seconds_since(plan.cluster_status.scheduled_time, plan.now)
    return STARTING_LOOK_SECONDS if waited < WAITING_LOOK_SECONDS else RUNNING_LOOK_SECONDS


def _planned(plan: PlanBuilder, requeue_after: float | None) -> Plan:
    return Plan(
        status=plan.status,
        actions=tuple(plan.actions),
        events=tuple(plan.events),
        requeue_after=requeue_after,
        status_first=plan.status_first,
        urgent=plan.status_first or (plan.status != plan.old and _outline(plan.status) != _outline(plan.old)),
    )


def _outline(status: RLJobStatus) -> RLJobStatus:
    """The status without what may wait for the next write: how far something is, and its wording.

    That the pods have their nodes may wait too: often they are ready a moment later, which is written at once. The last
    step's numbers may not: the driver is gone when the next write would come.
    """
    progress = status.progress
    placed = status.phase is JobPhase.STARTING and all(a.end_time is not None for a in status.attempts)
    attempts = [
        a.model_copy(update={"accepted": False, "accept_time": None, "start_step": None, "run_attempt": None})
        for a in status.attempts
    ]
    conditions = [
        c.model_copy(update={"reason": "", "message": ""}) for c in status.conditions if c.type != ConditionType.QUEUED
    ]
    return status.model_copy(
        update={
            "phase": JobPhase.QUEUED if placed else status.phase,
            "progress": Progress(step=progress.step) if progress and 0 < progress.steps <= progress.step else None,
            "goodput": None,
            "message": None,
            "cluster": None,
            "attempts": attempts,
            "conditions": conditions,
        }
    )
