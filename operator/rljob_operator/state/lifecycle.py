"""From nothing to a running driver, and back: what the job needs next."""

from __future__ import annotations

from rljob_api.status import JobPhase
from rljob_operator.state.attempts import begin_attempt, submit_again
from rljob_operator.state.deadlines import active_deadline_is_over, deadline_text
from rljob_operator.state.draft import Draft
from rljob_operator.state.failures import DEADLINE
from rljob_operator.state.plan import ApplyCluster, ApplyPolicy, ApplySecret, DeleteCluster, DeleteJob
from rljob_operator.state.texts import clean
from rljob_operator.state.timing import seconds_of, time_text


def begin_status(draft: Draft) -> None:
    """What every status of a job with a valid spec says."""
    old = draft.status
    draft.set(
        observed_generation=draft.job.generation,
        start_time=old.start_time or time_text(draft.now),
        attempt=old.attempt or 0,
        restarts=old.restarts or 0,
        queue=draft.spec.scheduling.queue,
    )
    if old.next_attempt_time is not None and draft.now >= seconds_of(old.next_attempt_time):
        draft.set(next_attempt_time=None)


def advance(draft: Draft) -> JobPhase:
    """Do what brings the job on, and tell its phase."""
    if draft.attempt is not None:
        submit_again(draft)
        return _phase_of_attempt(draft)
    if draft.spec.suspend:
        return _give_back(draft)
    if active_deadline_is_over(draft):
        draft.end = (DEADLINE, deadline_text(draft))
        return JobPhase.FAILED
    if draft.name_taken:
        return JobPhase.PENDING
    if draft.cluster is None:
        return _make_cluster(draft)
    draft.act(*_missing_parts(draft))
    if _ready_for_attempt(draft):
        begin_attempt(draft)
        return JobPhase.STARTING
    return JobPhase.STARTING if _scheduled(draft) else JobPhase.QUEUED


def release_cluster(draft: Draft) -> bool:
    """Delete the job's RayCluster, so that its devices are free; tells whether there still is one."""
    cluster = draft.own_cluster
    if cluster is None:
        return False
    if not cluster.deleting:
        draft.set(cluster=draft.cluster_status.model_copy(update={"released_uid": cluster.uid}))
        draft.act(DeleteCluster(cluster.uid), status_first=True)
    return True


def finish(draft: Draft) -> None:
    """End the job for good. What is known of its end is stored before the pods go."""
    draft.set(completion_time=time_text(draft.now), next_attempt_time=None)
    release_cluster(draft)


def retire(draft: Draft) -> float | None:
    """Care for a finished job: its cluster goes, and in time the job itself. Returns seconds until its TTL is over."""
    draft.set(observed_generation=draft.job.generation)
    release_cluster(draft)
    ttl = draft.job.spec.ttl_seconds_after_finished if draft.job.spec is not None else None
    if ttl is None or draft.status.completion_time is None:
        return None
    left = seconds_of(draft.status.completion_time) + ttl - draft.now
    if left > 0:
        return left
    draft.act(DeleteJob())
    return None


def _phase_of_attempt(draft: Draft) -> JobPhase:
    attempt, driver = draft.attempt, draft.driver
    assert attempt is not None
    was_ready = attempt.start_step is not None
    if driver is None:
        return JobPhase.RUNNING if was_ready and draft.head is not None else JobPhase.STARTING
    return JobPhase.RUNNING if driver.ready or was_ready else JobPhase.STARTING


def _give_back(draft: Draft) -> JobPhase:
    draft.set(next_attempt_time=None)
    if release_cluster(draft):
        return draft.status.phase or JobPhase.PENDING
    return JobPhase.SUSPENDED


def _make_cluster(draft: Draft) -> JobPhase:
    if release_cluster(draft):
        return JobPhase.QUEUED
    if draft.job.problem:
        return JobPhase.PENDING
    # The status comes first: it tells the API server that the spec is in use (see rljob_api.rules).
    draft.act(*_missing_parts(draft), ApplyCluster(), status_first=True)
    return JobPhase.QUEUED


def _missing_parts(draft: Draft) -> list[ApplySecret | ApplyPolicy]:
    if draft.job.problem:
        return []
    parts: list[ApplySecret | ApplyPolicy] = []
    if not draft.observed.secret_exists:
        parts.append(ApplySecret())
    if not draft.observed.policy_current:
        parts.append(ApplyPolicy())
    return parts


def keep_policy(draft: Draft) -> None:
    """Renew the head's NetworkPolicy while an attempt runs: somebody deleted it, or the operator has another address.

    After all else, and with the status stored first: a refusal must not keep the attempt from being followed.
    """
    wanted = not draft.observed.policy_current and not draft.job.problem
    if wanted and draft.attempt is not None and draft.cluster is not None and ApplyPolicy() not in draft.actions:
        draft.act(ApplyPolicy(), status_first=True)


def _scheduled(draft: Draft) -> bool:
    """Whether all pods have their nodes."""
    cluster, queue = draft.cluster, draft.observed.queue
    assert cluster is not None
    if cluster.ready:
        return True
    pods = [pod for pod in draft.observed.pods if not pod.deleting]
    admitted = not cluster.suspended and (queue is None or queue.admitted)
    return admitted and len(pods) > cluster.desired_workers and all(pod.node for pod in pods)


def _ready_for_attempt(draft: Draft) -> bool:
    cluster, head = draft.cluster, draft.head
    if cluster is None or not cluster.ready or cluster.suspended or head is None or not head.ready or draft.job.problem:
        return False
    return not former_head_ends(draft) and draft.status.next_attempt_time is None


def former_head_ends(draft: Draft) -> bool:
    """Whether another head pod is still ending: its driver may still write to the run folder.

    On a lost node nobody can tell; there the run folder's lock keeps two drivers apart.
    """
    return any(pod.deleting and not pod.node_lost for pod in draft.heads)


def problem_text(draft: Draft) -> str:
    """What is wrong with the spec, for the status."""
    return clean(draft.job.problem or "The spec cannot be read; see the operator's log.")
