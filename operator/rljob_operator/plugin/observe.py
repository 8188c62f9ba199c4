"""One job, looked at now: the objects that the operator watches, and the events and nodes that it does not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from rljob_api.quantities import to_number
from rljob_api.status import ConditionType
from rljob_api.validation import ManifestError
from rljob_operator.kubernetes_objects import ApiGroup, EventObject, QueueObject, RLJobObject
from rljob_operator.plugin.cluster import NODES, Cluster
from rljob_operator.plugin.head import NoWay, open_head
from rljob_operator.plugin.problems import CommandError
from rljob_operator.ray.http import NoAnswer
from rljob_operator.shell.api.client import ApiError
from rljob_operator.shell.api.resources import EVENTS, JOB_LABEL, PODS, RAY_CLUSTERS, SANDBOX_CLAIMS, JobKey, Resource
from rljob_operator.shell.caches.stored_spec import read_spec
from rljob_operator.shell.caches.views import (
    ClusterState,
    QueueState,
    cluster_state,
    job_view,
    pod_group_state,
    pod_view,
    ray_pod_key,
    workload_state,
)
from rljob_operator.shell.jobs.sandboxes import claim_view
from rljob_operator.state.causes import Cause
from rljob_operator.state.observed import (
    ClusterView,
    DriverView,
    JobView,
    Observed,
    PodView,
    QueueView,
    SandboxesView,
    SubmissionView,
)
from rljob_operator.state.pod_causes import NO_PULL_SECRET
from rljob_operator.state.queue_label import by_queue_label
from rljob_operator.state.refusals import REASONS
from rljob_operator.state.sandboxes import warm_pool

_QUEUES = (("kueue.x-k8s.io", "workloads", workload_state), ("scheduling.volcano.sh", "podgroups", pod_group_state))
_ORDINARY = ("cpu", "memory", "pods", "ephemeral-storage", "hugepages-", "attachable-volumes-")


class ObservedJob:
    """Objects that were found, and names of those that the user may not see.

    Args:
        observed: for `explain`.
        state: the job's RayCluster.
        unseen: sentences about what could not be read.
    """

    def __init__(self, observed: Observed, state: ClusterState | None, unseen: list[str]) -> None:
        self.observed = observed
        self.state = state
        self.unseen = unseen


def parse_job(item: RLJobObject) -> JobView:
    """View of an RLJob with its spec checked as the operator checks it."""
    try:
        return by_queue_label(job_view(item, *read_spec(item)))
    except ManifestError as error:
        return job_view(item, None, "; ".join(str(problem) for problem in error.problems))


async def look(cluster: Cluster, name: str) -> ObservedJob:
    """Read everything about a job that tells why it does not run.

    Raises:
        CommandError: the job itself cannot be read.
    """
    job = _with_operators_problem(parse_job(await cluster.job(name)))
    unseen: list[str] = []
    state, item = None, None
    try:
        item = await cluster.find(RAY_CLUSTERS, name)
    except CommandError as error:
        unseen.append(str(error))
    view: ClusterView | None = None
    if item is not None:
        state = cluster_state(item)
        view = state.for_job(job.uid)
    warnings = await _warnings(cluster, unseen)
    pods = await _pods(cluster, name, warnings, unseen)
    if view is not None:
        view = replace(view, warning=warnings.get(view.uid, ""))
    observed = Observed(
        job=job,
        cluster=view,
        pods=pods,
        refused=_refused(job) if view is None else None,
        names_taken=next((c.message for c in job.status.conditions if c.reason == "NamesTaken"), ""),
        queue=None if view is None else await _queue(cluster, view.uid, unseen),
        sandboxes=await _sandboxes(cluster, job, unseen),
        node_devices=await _devices(cluster) if any(pod.unschedulable for pod in pods) else None,
    )
    if state is not None and view is not None and view.owned:
        observed = await _asked(cluster, observed, state, unseen)
    return ObservedJob(observed, state, unseen)


def _refused(job: JobView) -> Cause | None:
    """Requests of the operator that the API server refused, from the job's condition."""
    conditions = [c for c in job.status.conditions if c.type == ConditionType.QUEUED and c.reason in REASONS]
    return Cause(conditions[0].reason, conditions[0].message) if conditions else None


def _with_operators_problem(job: JobView) -> JobView:
    """The operator also refuses what it cannot render, which depends on its settings; its condition says so."""
    refused = next((c for c in job.status.conditions if c.reason == "InvalidSpec" and c.message), None)
    if job.problem or refused is None or refused.observed_generation not in (None, job.generation):
        return job
    return replace(job, problem=refused.message)


async def _sandboxes(cluster: Cluster, job: JobView, unseen: list[str]) -> SandboxesView:
    if warm_pool(job.spec) is None:
        return SandboxesView()
    try:
        query = {"labelSelector": f"{JOB_LABEL}={job.name}"}
        items = await cluster.list(SANDBOX_CLAIMS, cluster.namespace, "list the job's SandboxClaims", query)
    except CommandError as error:
        unseen.append(str(error))
        return SandboxesView(unseen=True)
    return SandboxesView(tuple(claim_view(item, job.uid) for item in items))


async def _pods(cluster: Cluster, name: str, warnings: Mapping[str, str], unseen: list[str]) -> tuple[PodView, ...]:
    try:
        query = {"labelSelector": f"ray.io/cluster={name}"}
        items = await cluster.list(PODS, cluster.namespace, "list the job's pods", query)
    except CommandError as error:
        unseen.append(str(error))
        return ()
    views = [pod_view(item) for item in items if ray_pod_key(item)]
    ordered = sorted(views, key=lambda pod: (pod.role != "head", pod.name))
    return tuple(replace(pod, warning=warnings.get(pod.uid, "")) for pod in ordered)


async def _warnings(cluster: Cluster, unseen: list[str]) -> dict[str, str]:
    """The newest Warning about each object, by UID; one that explains the others is kept."""
    try:
        query = {"fieldSelector": "type=Warning"}
        items = await cluster.list(EVENTS, cluster.namespace, "list events", query)
    except CommandError as error:
        unseen.append(str(error))
        return {}
    items.sort(key=lambda item: (item.get("reason") == NO_PULL_SECRET, _when(item)))
    return {
        str(item["involvedObject"].get("uid")): f"{item.get('reason')}: {item.get('message') or ''}" for item in items
    }


def _when(event: EventObject) -> str:
    series = event.get("series") or {}
    return str(
        series.get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp")
        or ""
    )


async def _queue(cluster: Cluster, uid: str, unseen: list[str]) -> QueueView | None:
    for group, plural, state_of in _QUEUES:
        version = await _version(cluster, group)
        if version is None:
            continue
        try:
            resource: Resource[QueueObject] = Resource(group, version, plural)
            items = await cluster.list(resource, cluster.namespace, f"list {plural}")
        except CommandError as error:
            unseen.append(str(error))
            continue
        states: list[QueueState] = [state_of(item) for item in items]
        for state in states:
            if state.cluster_uid == uid:
                return state.view
    return None


async def _version(cluster: Cluster, group: str) -> str | None:
    """The version that the API server prefers; None when it does not have the group."""
    try:
        answer = await cluster.client.request("GET", f"/apis/{group}")
        return str(cast("ApiGroup", answer)["preferredVersion"]["version"])
    except (ApiError, KeyError, TypeError):
        return None


async def _devices(cluster: Cluster) -> dict[str, int] | None:
    """The most of each extended resource on any one node; None when the user may not see nodes."""
    try:
        nodes = await cluster.list(NODES, None, "list nodes")
    except CommandError:
        return None
    largest: dict[str, int] = {}
    for node in nodes:
        for resource, amount in ((node.get("status") or {}).get("allocatable") or {}).items():
            if not resource.startswith(_ORDINARY):
                largest[resource] = max(largest.get(resource, 0), to_number(str(amount)))
    return largest


async def _asked(cluster: Cluster, observed: Observed, state: ClusterState, unseen: list[str]) -> Observed:
    """With what the head and the driver say, while an attempt runs."""
    last = observed.job.status.attempts[-1] if observed.job.status.attempts else None
    if last is None or last.end_time is not None or last.submission_id is None or state.view.head_pod is None:
        return observed
    key = JobKey(observed.job.namespace, observed.job.name)
    submission: SubmissionView | None = None
    driver: DriverView | None = None
    submission_error = driver_error = ""
    async with open_head(cluster, key, observed.job.uid, state) as head:
        try:
            submission = await (await head.jobs()).get(last.submission_id)
        except NoWay as error:
            unseen.append(str(error))
        except NoAnswer as error:
            submission_error = str(error)
        try:
            said = await (await head.driver()).status()
            driver = DriverView(
                ready=said.ready,
                step=said.step,
                attempt=said.attempt,
                phase=said.phase,
                phase_seconds=said.phase_seconds,
                lanes=said.lanes,
                groups=said.groups,
                engine_nodes=said.engine_nodes,
                stopping=said.stopping,
                last_checkpoint_step=said.last_checkpoint_step,
            )
        except NoWay as error:
            unseen.append(str(error))
        except NoAnswer as error:
            driver_error = str(error)
    return replace(
        observed,
        submission=submission,
        submission_error=submission_error,
        driver=driver,
        driver_error=driver_error,
    )
