"""What to do about one job, from what is observed of it: `reconcile(observed, now) -> Plan`.

Pure and level-triggered: it may be called at any time, any number of times, with observations that lag behind, and by
an operator that died between any two actions. What must be remembered stands in the status; what must not happen twice
is stored there before it is done (`Plan.status_first`).

| phase | means | leaves it when |
|---|---|---|
| Pending | the spec is invalid, or another RayCluster has the name | that is corrected |
| Queued | devices are asked for | every pod has its node |
| Starting | devices are held, no driver is ready | the driver is ready |
| Running | the driver is ready | it ends, or is lost |
| Suspended | `spec.suspend`; the devices are given back | `spec.suspend` is false |
| Succeeded, Failed | final | the TTL is over |
"""

from __future__ import annotations

from rljob_api.status import ConditionType, JobPhase, Progress, RLJobStatus
from rljob_operator.state.attempts import Verdict, follow_attempt, give_up_unsubmitted, note_acceptance
from rljob_operator.state.checkpoints import request_checkpoint
from rljob_operator.state.conditions import record_cluster, set_conditions
from rljob_operator.state.deadlines import stop_what_must_end
from rljob_operator.state.draft import FINAL, Draft
from rljob_operator.state.goodput import count_steps, settle
from rljob_operator.state.lifecycle import advance, begin_status, finish, keep_policy, problem_text, retire
from rljob_operator.state.observed import Observed
from rljob_operator.state.plan import Plan
from rljob_operator.state.progress import read_progress
from rljob_operator.state.timing import (
    RUNNING_LOOK_SECONDS,
    STARTING_LOOK_SECONDS,
    WAITING_LOOK_SECONDS,
    seconds_of,
    seconds_since,
)

_COMPARED = 200
"""Characters of a spec's problem by which it is known again where it is told beside something else."""


def reconcile(observed: Observed, now: float) -> Plan:
    """Return what the job needs now.

    Args:
        observed: everything that is known; its parts may be of different age.
        now: Unix seconds.
    """
    draft = Draft(observed, now)
    if observed.job.deleting:
        return Plan(status=draft.old, urgent=False)
    if draft.finished:
        return _plan(draft, retire(draft))
    if observed.job.spec is None or (observed.job.problem and not _begun(draft)):
        return _refuse(draft)
    begin_status(draft)
    note_acceptance(draft)
    count_steps(draft)
    read_progress(draft)
    verdict = follow_attempt(draft)
    if verdict is None:
        stop_what_must_end(draft)
        verdict = give_up_unsubmitted(draft)
    phase = _next_phase(draft, verdict)
    request_checkpoint(draft)
    keep_policy(draft)
    record_cluster(draft)
    settle(draft, phase)
    set_conditions(draft, phase)
    _announce(draft, phase)
    return _plan(draft, _next_look(draft, phase))


def _next_phase(draft: Draft, verdict: Verdict | None) -> JobPhase:
    phase = {Verdict.SUCCEED: JobPhase.SUCCEEDED, Verdict.FAIL: JobPhase.FAILED}.get(verdict) if verdict else None
    if phase is None:
        phase = advance(draft)
    if phase in FINAL:
        finish(draft)
    return phase


def _begun(draft: Draft) -> bool:
    """Whether anything was done for the job: then it is cared for to its end, even if its spec renders no more."""
    return draft.old.start_time is not None or draft.own_cluster is not None


def _refuse(draft: Draft) -> Plan:
    """A spec that cannot be read, or never was rendered: nothing is begun, and nothing that runs is touched."""
    text = problem_text(draft)
    if draft.old.message != text:
        draft.note("Warning", "InvalidSpec", text)
    if draft.own_cluster is None and draft.attempt is None:
        settle(draft, JobPhase.PENDING)
        draft.set_condition(ConditionType.QUEUED, "False", "InvalidSpec", text)
    draft.set(observed_generation=draft.job.generation, message=text)
    return _plan(draft, None)


def _announce(draft: Draft, phase: JobPhase) -> None:
    if draft.job.problem:
        text = problem_text(draft)
        said, before = draft.status.message or "", draft.old.message or ""
        if text[:_COMPARED] in said and text[:_COMPARED] not in before:
            draft.note("Warning", "InvalidSpec", text)
    if phase is not draft.old.phase:
        draft.note("Warning" if phase is JobPhase.FAILED else "Normal", str(phase), draft.status.message or str(phase))


def _next_look(draft: Draft, phase: JobPhase) -> float | None:
    attempt, now = draft.attempt, draft.now
    if phase in FINAL:
        ttl = draft.spec.ttl_seconds_after_finished
        return None if ttl is None else float(ttl)
    if phase is JobPhase.SUSPENDED or (phase is JobPhase.PENDING and draft.job.problem and not draft.name_taken):
        return None
    if attempt is not None:
        starts = phase is JobPhase.STARTING and seconds_since(attempt.start_time, now) < WAITING_LOOK_SECONDS
        return STARTING_LOOK_SECONDS if starts else RUNNING_LOOK_SECONDS
    if draft.status.next_attempt_time is not None:
        return min(WAITING_LOOK_SECONDS, max(1.0, seconds_of(draft.status.next_attempt_time) - now))
    return WAITING_LOOK_SECONDS


def _plan(draft: Draft, requeue_after: float | None) -> Plan:
    return Plan(
        status=draft.status,
        actions=tuple(draft.actions),
        events=tuple(draft.events),
        requeue_after=requeue_after,
        status_first=draft.status_first,
        urgent=draft.status_first or _outline(draft.status) != _outline(draft.old),
    )


def _outline(status: RLJobStatus) -> RLJobStatus:
    """The status without what may wait for the next write: how far something is, and in which words it is told.

    That the pods have their nodes may wait too: often they are ready a moment later, which is written at once. The last
    step's numbers may not: the driver is gone when the next write would come.
    """
    progress = status.progress
    placed = status.phase is JobPhase.STARTING and all(a.end_time is not None for a in status.attempts)
    attempts = [
        a.model_copy(update={"accepted": False, "start_step": None, "run_attempt": None}) for a in status.attempts
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
