"""Kueue's label on an RLJob, as far as it counts: what has its devices keeps the queue that it was given."""

from __future__ import annotations

from dataclasses import replace

from rljob_api.queue_label import QUEUE_LABEL, labelled_queue, queue_conflict, with_queue
from rljob_api.spec import QueueSystem, RLJobSpec
from rljob_api.status import JobPhase
from rljob_operator.state.observed import JobView

_FREE = (None, JobPhase.PENDING, JobPhase.SUSPENDED)
"""Phases in which `spec.scheduling` may change too: nothing is asked for."""


def by_queue_label(job: JobView) -> JobView:
    """The job with what its label says in `spec.scheduling`.

    A label that contradicts the spec is a problem before devices are asked for, and a remark after that; so is one that
    was changed meanwhile.
    """
    if job.spec is None:
        return job
    queue, given = labelled_queue(job.labels), job.spec.scheduling
    if job.status.phase in _FREE:
        if queue is None:
            return job
        conflict = queue_conflict(job.spec, queue)
        if conflict:
            text = f"metadata.labels: {QUEUE_LABEL} is {queue!r} and {conflict}; set one of them, or both to the same"
            return replace(job, problem=job.problem or text)
        return replace(job, spec=_queued(job.spec, queue))
    kept = job.status.queue if given.queue is None else None
    spec = job.spec if kept is None else _queued(job.spec, kept)
    used = spec.scheduling.queue
    kueue = spec.scheduling.system is QueueSystem.KUEUE
    if (queue is None and kept is None) or (kueue and queue == used):
        return replace(job, spec=spec)
    label = "was taken away" if queue is None else f"is {queue!r} now"
    place = f"stays in {spec.scheduling.system}'s queue {used!r}" if used else "has no queue"
    remark = f"The label {QUEUE_LABEL} {label}, which has no effect: the job {place} until it is suspended."
    return replace(job, spec=spec, remark=remark)


def _queued(spec: RLJobSpec, queue: str) -> RLJobSpec:
    return spec.model_copy(update={"scheduling": with_queue(spec.scheduling, queue)})
