"""Cost of a preemption at this time, for Kueue: of jobs of one priority it takes those first that lose least.

Kueue adds the annotation `kueue.x-k8s.io/priority-boost` of a Workload to its priority (Kueue 0.17 and later, feature
gate `PriorityBoost`; KEP 7990). Between jobs of equal priority it would take the one that was admitted last, whatever
that one has not saved. A boost is at most MAX_BOOST, so that priority classes that are further apart keep their order,
and a job that waits has none: it must not overtake those that waited longer.

Kueue takes jobs in this order until it has the devices that it needs. So what counts is what is lost for each device:
the time since the last checkpoint, or since the attempt began. That times the job's devices would end many small jobs
in place of a large one (benchmarks/preemption.py has both). A boost is the time's logarithm, so that it is written at
most ten times between two checkpoints, however far they are apart.
"""

from __future__ import annotations

import math

from rljob_api.spec import QueueSystem
from rljob_api.status import JobPhase
from rljob_operator.state.observed import WorkloadView
from rljob_operator.state.plan import AnnotateWorkload
from rljob_operator.state.plan_builder import FINAL, PlanBuilder
from rljob_operator.state.timing import seconds_of, seconds_since

BOOST_ANNOTATION = "kueue.x-k8s.io/priority-boost"
SAVED_ANNOTATION = "rljob.dev/last-checkpoint"
MAX_BOOST = 9
_NOTHING_SECONDS = 60.0
"""Starting anew costs more: nobody is spared for it."""
_SAVED_SECONDS = 300.0
"""Seconds that SAVED_ANNOTATION may be behind while the boost stays the same."""


def priority_boost(unsaved_seconds: float) -> int:
    """From 0 (less than a minute to lose) to MAX_BOOST (more than four hours), one more for each doubling."""
    if unsaved_seconds < _NOTHING_SECONDS:
        return 0
    return min(MAX_BOOST, 1 + int(math.log2(unsaved_seconds / _NOTHING_SECONDS)))


def tell_cost(plan: PlanBuilder, phase: JobPhase) -> None:
    """Bring the annotations of the job's Workload up to date, where the administrator wants that."""
    queue, observed = plan.observed.queue, plan.observed
    workload = queue.workload if queue is not None else None
    if not observed.boosts_priority or queue is None or workload is None or phase in FINAL:
        return
    if plan.spec.scheduling.system is not QueueSystem.KUEUE:
        return
    saved = _saved(plan)
    boost = priority_boost(_unsaved_seconds(plan, saved)) if queue.admitted else 0
    if str(boost) != (workload.boost or "0") or _is_behind(workload, saved):
        plan.act(AnnotateWorkload(workload.name, workload.uid, boost, saved))


def _saved(plan: PlanBuilder) -> str:
    progress = plan.status.progress
    checkpoint = progress.last_checkpoint if progress is not None else None
    return (checkpoint.time or "") if checkpoint is not None else ""


def _unsaved_seconds(plan: PlanBuilder, saved: str) -> float:
    if plan.attempt is None:
        return 0.0
    begun = [time for time in (plan.attempt.start_time, saved) if time]
    return min((seconds_since(time, plan.now) for time in begun), default=0.0)


def _is_behind(workload: WorkloadView, saved: str) -> bool:
    """Whether another checkpoint should be named: none was, or a much older one. Somebody else's text is no time."""
    if saved == workload.last_checkpoint:
        return False
    try:
        return not saved or seconds_of(saved) - seconds_of(workload.last_checkpoint) >= _SAVED_SECONDS
    except ValueError:
        return True
