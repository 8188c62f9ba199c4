"""Kueue's label on an RLJob: `kueue.x-k8s.io/queue-name` means `scheduling: {system: Kueue, queue: LABEL}`."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_api.spec import QueueSystem, RLJobSpec, SchedulingSpec

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def labelled_queue(labels: Mapping[str, str] | None) -> str | None:
    """Queue that the labels name; None: none. Kueue takes an empty name for none too."""
    return (labels or {}).get(QUEUE_LABEL) or None


def queue_conflict(spec: RLJobSpec, queue: str) -> str:
    """Field of the spec that says otherwise than the label, and its value; empty: none does."""
    scheduling, engines = spec.scheduling, spec.resources.rollout
    if scheduling.system not in (QueueSystem.NONE, QueueSystem.KUEUE):
        return f"spec.scheduling.system is {scheduling.system}"
    if scheduling.queue not in (None, queue):
        return f"spec.scheduling.queue is {scheduling.queue!r}"
    if engines is not None and engines.max_nodes is not None:
        return f"spec.resources.rollout.maxNodes is {engines.max_nodes}, and a queue admits a fixed number of pods"
    return ""


def with_queue(scheduling: SchedulingSpec, queue: str) -> SchedulingSpec:
    """The same with Kueue and this queue."""
    return scheduling.model_copy(update={"system": QueueSystem.KUEUE, "queue": queue})
