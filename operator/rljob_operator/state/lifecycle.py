"""From nothing to a running driver, and back: what the job needs next."""

from __future__ import annotations

from rljob_api import derived
from rljob_api.spec import FailureReason
from rljob_api.status import AttemptStatus, JobPhase
from rljob_operator.state.attempts import begin_attempt, submit_again
from rljob_operator.state.deadlines import active_deadline_is_over, deadline_text
from rljob_operator.state.failures import pod_failure
from rljob_operator.state.plan import ApplyPolicy, ApplySecret, CreateCluster, DeleteJob
from rljob_operator.state.plan_builder import PlanBuilder
from rljob_operator.state.reasons import EndReason
from rljob_operator.state.release import former_head_ends, release_cluster
from rljob_operator.state.sandboxes import claim_sandboxes, may_hold_sandboxes, release_sandboxes, sandbox_problem
from rljob_operator.state.scaling import spare_pods
from rljob_operator.state.status_text import clean
from rljob_operator.state.timing import WAITING_LOOK_SECONDS, seconds_of, time_text


def begin_status(plan: PlanBuilder) -> None:
    """Fields of every status of a job with a valid spec."""
    old = plan.status
    plan.set(
        observed_generation=plan.job.generation,
        start_time=old.start_time or time_text(plan.now),
        attempt=old.attempt or 0,
        restarts=old.restarts or 0,
        queue=plan.spec.scheduling.queue,
    )
    if old.next_attempt_time is not None and plan.now >= seconds_of(old.next_attempt_time):
        plan.set(next_attempt_time=None)


def advance(plan: PlanBuilder) -> JobPhase:
    """Do what brings the job on, and tell its phase."""
    if plan.attempt is not None:
        submit_again(plan)
        return _phase_of_attempt(plan)
    if plan.spec.suspend:
        return _give_back(plan)
    if active_deadline_is_over(plan):
        plan.end = (EndReason.DEADLINE, deadline_text(plan))
        return JobPhase.FAILED
    if plan.name_taken:
        return JobPhase.PENDING
    if _given_up(plan):
        release_cluster(plan)
        release_sandboxes(plan)
        return JobPhase.QUEUED
    if plan.cluster is None:
        return _make_cluster(plan)
    plan.act(*_missing_parts(plan))
    scheduled = all_scheduled(plan)
    if scheduled:
        claim_sandboxes(plan)
    elif _asks_queue(plan):
        release_sandboxes(plan)
    if _ready_for_attempt(plan):
        begin_attempt(plan)
        return JobPhase.STARTING
    return JobPhase.STARTING if scheduled else JobPhase.QUEUED


def _asks_queue(plan: PlanBuilder) -> bool:
    """Whether the queue has taken the devices, or not given them yet; not while a pod is made anew."""
    cluster, queue = plan.cluster, plan.observed.queue
    return cluster is None or cluster.suspended or (queue is not None and not queue.admitted)


def _given_up(plan: PlanBuilder) -> bool:
    """Whether the pods could not be made ready: during the wait that follows others may have their devices."""
    last = plan.last_attempt
    unready = last is not None and last.reason == FailureReason.READY_TIMEOUT
    return unready and plan.status.next_attempt_time is not None


def finish(plan: PlanBuilder) -> None:
    """End the job for good. What is known of its end is stored before the pods go."""
    plan.set(completion_time=time_text(plan.now), next_attempt_time=None)
    release_cluster(plan)
    release_sandboxes(plan)


def retire(plan: PlanBuilder) -> float | None:
    """Care for a finished job: its cluster goes, and in time the job itself.

    Returns:
        Seconds until it is to be looked at again.
    """
    plan.set(observed_generation=plan.job.generation)
    release_cluster(plan)
    release_sandboxes(plan)
    ttl = plan.job.spec.ttl_seconds_after_finished if plan.job.spec is not None else None
    look = WAITING_LOOK_SECONDS if plan.own_cluster is not None or may_hold_sandboxes(plan.observed) else None
    if ttl is None or plan.status.completion_time is None:
        return look
    left = seconds_of(plan.status.completion_time) + ttl - plan.now
    if left > 0:
        return left if look is None else min(left, look)
    plan.act(DeleteJob())
    return None


def _phase_of_attempt(plan: PlanBuilder) -> JobPhase:
    attempt, driver = plan.attempt, plan.driver
    assert attempt is not None
    was_ready = attempt.start_step is not None
    if driver is None:
        return JobPhase.RUNNING if was_ready and plan.head is not None else JobPhase.STARTING
    return JobPhase.RUNNING if driver.ready or was_ready else JobPhase.STARTING


def _give_back(plan: PlanBuilder) -> JobPhase:
    plan.set(next_attempt_time=None)
    release_cluster(plan)
    release_sandboxes(plan)
    asked_for = plan.own_cluster is None or plan.own_cluster.deleting
    return JobPhase.SUSPENDED if asked_for else plan.status.phase or JobPhase.PENDING


def _make_cluster(plan: PlanBuilder) -> JobPhase:
    release_sandboxes(plan)
    if release_cluster(plan):
        return JobPhase.QUEUED
    if plan.job.problem or plan.observed.names_taken:
        return JobPhase.PENDING
    # The status comes first: it tells the API server that the spec is in use (see rljob_api.rules).
    plan.act(*_missing_parts(plan), CreateCluster(), status_first=True)
    return JobPhase.QUEUED


def _missing_parts(plan: PlanBuilder) -> list[ApplySecret | ApplyPolicy]:
    if plan.job.problem:
        return []
    parts: list[ApplySecret | ApplyPolicy] = []
    if not plan.observed.secret_exists:
        parts.append(ApplySecret())
    if not plan.observed.policy_current:
        parts.append(ApplyPolicy())
    return parts


def keep_policy(plan: PlanBuilder) -> None:
    """Renew the head's NetworkPolicy while an attempt runs: somebody deleted it, or the operator has another address.

    After all else, and with the status stored first: a refusal must not keep the attempt from being followed.
    """
    wanted = not plan.observed.policy_current and not plan.job.problem
    if wanted and plan.attempt is not None and plan.cluster is not None and ApplyPolicy() not in plan.actions:
        plan.act(ApplyPolicy(), status_first=True)


def all_scheduled(plan: PlanBuilder) -> bool:
    """Whether all pods have their nodes that the job cannot begin without."""
    cluster, queue = plan.cluster, plan.observed.queue
    assert cluster is not None
    if cluster.ready:
        return True
    pods = [pod for pod in plan.observed.pods if not pod.deleting]
    admitted = not cluster.suspended and (queue is None or queue.admitted)
    without = [pod for pod in pods if not pod.node]
    spare = all(pod.group == derived.ENGINE_GROUP for pod in without) and len(without) <= spare_pods(plan.observed)
    return admitted and len(pods) > cluster.desired_workers and spare


def _ready_for_attempt(plan: PlanBuilder) -> bool:
    cluster, head = plan.cluster, plan.head
    if cluster is None or cluster.suspended or head is None or not head.ready or plan.job.problem:
        return False
    if sandbox_problem(plan.observed) is not None:
        return False
    if not is_whole(plan) and not _begins_with_fewer(plan):
        return False
    return not former_head_ends(plan) and plan.status.next_attempt_time is None


def is_whole(plan: PlanBuilder) -> bool:
    """Whether the cluster is ready, and its pods say nothing else: they are seen to fail before KubeRay says so. The
    sandboxes that the job asks for are bound too.

    No attempt begins that the next look would end.
    """
    cluster, head = plan.cluster, plan.head
    if cluster is None or head is None or not cluster.ready or sandbox_problem(plan.observed) is not None:
        return False
    begun = AttemptStatus(number=0, head_uid=head.uid, start_time=time_text(plan.now))
    return pod_failure(plan.observed, begun, fatal=True) is None


def _begins_with_fewer(plan: PlanBuilder) -> bool:
    """Whether the only pods that are not ready are some with engines for which there is no node now."""
    there = [pod for pod in plan.observed.pods if pod.node and not pod.deleting]
    return spare_pods(plan.observed) > 0 and all_scheduled(plan) and all(pod.ready for pod in there)


def problem_text(plan: PlanBuilder) -> str:
    """Problems of the spec, for the status."""
    return clean(plan.job.problem or "The spec cannot be read; see the operator's log.")
