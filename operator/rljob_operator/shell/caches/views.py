"""From Kubernetes objects to the reconciler's input. Pure; usable for objects from other sources too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from rljob_api.derived import ENGINE_GROUP
from rljob_api.spec import RLJobSpec
from rljob_api.status import RLJobStatus
from rljob_operator.kubernetes_objects import (
    Condition,
    ContainerStatus,
    KubeObject,
    ObjectMeta,
    PodObject,
    PodStatus,
    QueueObject,
    RayClusterObject,
    RayClusterSpec,
    RayClusterStatus,
    RLJobObject,
    Terminated,
    Waiting,
)
from rljob_operator.render import DIGEST_ANNOTATION
from rljob_operator.shell.api.owners import controller_of, controller_uid
from rljob_operator.shell.api.resources import JOB_LABEL, JobKey
from rljob_operator.state.observed import (
    ClusterView,
    EngineGroupView,
    JobView,
    PodRole,
    PodView,
    QueueView,
    WorkloadView,
)
from rljob_operator.state.preemption import BOOST_ANNOTATION, SAVED_ANNOTATION

_MESSAGE = 1024
_NOT_SAID: Condition = {"type": ""}
_STARTING = ("PodInitializing", "ContainerCreating")
_NODE_LOST = ("NodeLost", "DeletionByTaintManager", "DeletionByPodGC")
_DISRUPTED = ("EvictionByEvictionAPI", "PreemptionByScheduler", "TerminationByKubelet")


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A RayCluster as the cache keeps it."""

    view: ClusterView
    owner_uid: str = ""
    token_secret: str = ""
    """Secret with Ray's token, where token authentication is on."""

    def for_job(self, uid: str) -> ClusterView:
        """The view of the job with this UID."""
        owned = bool(uid) and self.owner_uid == uid
        return replace(self.view, owned=owned, owner="" if owned else self.view.owner)


@dataclass(frozen=True, slots=True)
class QueueState:
    """A Workload or PodGroup as the cache keeps it."""

    view: QueueView
    cluster_uid: str


@dataclass(frozen=True, slots=True)
class PolicyState:
    """A head's NetworkPolicy as the cache keeps it."""

    owner_uid: str
    """UID of the RLJob that controls it; empty: none does."""
    digest: str
    """Digest of the spec from which it was rendered."""


# --- whose object it is ------------------------------------------------------------------------


def own_key(item: KubeObject) -> JobKey:
    """Job with the object's own name: RLJobs and RayClusters."""
    return JobKey(str(item["metadata"].get("namespace", "")), str(item["metadata"]["name"]))


def labelled_key(item: KubeObject) -> JobKey | None:
    """Job that the object's label names: pods and NetworkPolicies."""
    name = (item["metadata"].get("labels") or {}).get(JOB_LABEL)
    return JobKey(str(item["metadata"].get("namespace", "")), name) if name else None


def ray_pod_key(item: KubeObject) -> JobKey | None:
    """Job of a Ray pod; KubeRay's other pods (Redis clean-up) are none of ours."""
    return labelled_key(item) if _labels(item).get("ray.io/node-type") in ("head", "worker") else None


def queue_key(item: KubeObject) -> JobKey | None:
    """Job whose RayCluster owns a Workload or PodGroup."""
    owner = controller_of(item)
    if owner is None or owner["kind"] != "RayCluster":
        return None
    return JobKey(str(item["metadata"].get("namespace", "")), str(owner["name"]))


# --- RLJob -------------------------------------------------------------------------------------


def job_view(item: RLJobObject, spec: RLJobSpec | None, problem: str) -> JobView:
    """View of an RLJob whose spec was checked already.

    Raises:
        ValueError: the stored status is none (pydantic's error, which names the field).
    """
    meta = item["metadata"]
    return JobView(
        namespace=str(meta.get("namespace", "")),
        name=str(meta["name"]),
        uid=str(meta["uid"]),
        generation=int(meta.get("generation", 1)),
        created=unix_seconds(meta["creationTimestamp"]),
        spec=spec,
        problem=problem,
        status=RLJobStatus.model_validate(item.get("status") or {}),
        deleting="deletionTimestamp" in meta,
        annotations=meta.get("annotations") or {},
        labels=_labels(item),
    )


# --- RayCluster --------------------------------------------------------------------------------


def cluster_state(item: RayClusterObject) -> ClusterState:
    """A RayCluster, as its metadata, a few fields of its spec and KubeRay's status tell."""
    meta, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    conditions = _by_type(status.get("conditions"))
    head, auth, owner = status.get("head") or {}, spec.get("authOptions") or {}, controller_of(item)
    desired, ready = int(status.get("desiredWorkerReplicas") or 0), int(status.get("readyWorkerReplicas") or 0)
    provisioned, suspended = _holds(conditions, "RayClusterProvisioned"), _suspended(spec, status, conditions)
    failure = conditions.get("ReplicaFailure", _NOT_SAID)
    view = ClusterView(
        name=str(meta["name"]),
        uid=str(meta["uid"]),
        ready=_cluster_ready(meta, status, conditions, provisioned and ready >= desired and not suspended),
        suspended=suspended,
        deleting="deletionTimestamp" in meta,
        owned=False,
        head_pod=head.get("podName") or None,
        head_service=head.get("serviceName") or None,
        desired_workers=desired,
        ready_workers=ready,
        engine_group=_engine_group(spec),
        failure=_cut(failure.get("message") or status.get("reason")) if failure.get("status") == "True" else "",
        created=unix_seconds(meta["creationTimestamp"]),
        owner=f"{owner['kind']} {owner['name']}" if owner else "",
        answered=bool(status),
    )
    secret = str(auth.get("secretName") or meta["name"]) if auth.get("mode") == "token" else ""
    return ClusterState(view, owner["uid"] if owner is not None else "", secret)


def _engine_group(spec: RayClusterSpec) -> EngineGroupView | None:
    groups = enumerate(spec.get("workerGroupSpecs") or ())
    replicas = (
        (index, int(group.get("replicas") or 0)) for index, group in groups if group["groupName"] == ENGINE_GROUP
    )
    return next((EngineGroupView(*found) for found in replicas), None)


def _suspended(spec: RayClusterSpec, status: RayClusterStatus, conditions: Mapping[str, Condition]) -> bool:
    """Whether somebody suspends the cluster: from the wish on, since KubeRay says it is done when all pods are gone."""
    begun = _holds(conditions, "RayClusterSuspending") or _holds(conditions, "RayClusterSuspended")
    return spec.get("suspend") is True or begun or status.get("state") == "suspended"


def _cluster_ready(
    meta: ObjectMeta, status: RayClusterStatus, conditions: Mapping[str, Condition], complete: bool
) -> bool:
    """Whether head and workers are ready now: KubeRay's `state` and `RayClusterProvisioned` stay when pods go."""
    current = int(status.get("observedGeneration") or 0) >= int(meta.get("generation") or 0)
    return complete and current and _holds(conditions, "HeadPodReady")


# --- NetworkPolicies ----------------------------------------------------------------------------


def policy_state(item: KubeObject) -> PolicyState:
    """The NetworkPolicy of a job's head, or one with its name."""
    return PolicyState(controller_uid(item), (item["metadata"].get("annotations") or {}).get(DIGEST_ANNOTATION, ""))


# --- pods --------------------------------------------------------------------------------------


def pod_view(item: PodObject) -> PodView:
    """A pod of a Ray cluster."""
    meta, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    conditions = _by_type(status.get("conditions"))
    disrupted = conditions.get("DisruptionTarget", _NOT_SAID)
    cause = str(disrupted.get("reason") or "") if disrupted.get("status") == "True" else ""
    waiting, (ended, ended_container) = _waiting(status), _ended(status)
    reason, message = str(status.get("reason") or ended.get("reason") or ""), status.get("message")
    if not status.get("reason") and cause in _DISRUPTED:
        reason, message = "Evicted", disrupted.get("message")
    scheduled = conditions.get("PodScheduled", _NOT_SAID)
    held = scheduled.get("reason") if scheduled.get("status") == "False" else ""
    since = scheduled.get("lastTransitionTime") if scheduled.get("status") == "True" else None
    return PodView(
        name=str(meta["name"]),
        uid=str(meta["uid"]),
        role=PodRole(_labels(item)["ray.io/node-type"]),
        phase=str(status.get("phase") or "Pending"),
        ready=_holds(conditions, "Ready") and status.get("phase") == "Running",
        deleting="deletionTimestamp" in meta,
        deleted=unix_seconds(meta["deletionTimestamp"]) if "deletionTimestamp" in meta else None,
        cluster_uid=_owner_uid(item),
        group=_labels(item).get("ray.io/group", ""),
        address=status.get("podIP") or None,
        node=spec.get("nodeName") or None,
        scheduled=unix_seconds(since) if since else None,
        node_lost=status.get("phase") == "Unknown" or status.get("reason") in _NODE_LOST or cause in _NODE_LOST,
        waiting_reason=str(waiting.get("reason") or ""),
        waiting_message=_cut(waiting.get("message")),
        terminated_reason=reason,
        terminated_message=_cut(message or ended.get("message")),
        exit_code=ended.get("exitCode"),
        ended_container=ended_container,
        unschedulable=_cut(scheduled.get("message")) if held == "Unschedulable" else "",
        gated=held == "SchedulingGated",
    )


def explains_failure(pod: PodView, now: PodView | None) -> bool:
    """Whether the state of a pod before it was deleted may explain what became of its job.

    That of a worker that ran or had failed does: KubeRay deletes a failed pod at once, and the evidence with it, and a
    pod that is deleted without grace is replaced within a moment. What a pod shows while it ends explains nothing: it
    fails too, by the signal.

    Args:
        pod: the state before.
        now: the state after; None: it is gone.
    """
    deleted = not pod.deleting and (now is None or now.deleting)
    return deleted and pod.role is PodRole.WORKER and (pod.ready or pod.phase == "Failed")


def _containers(status: PodStatus) -> list[ContainerStatus]:
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _waiting(status: PodStatus) -> Waiting:
    found = [state for one in _containers(status) if (state := (one.get("state") or {}).get("waiting"))]
    nothing: Waiting = {}
    return next((state for state in found if state.get("reason") not in _STARTING), found[0] if found else nothing)


def _ended(status: PodStatus) -> tuple[Terminated, str]:
    """The first container that ended, now or (where it waits to be started again) before; a good end of an init
    container is none."""
    init = {one["name"] for one in status.get("initContainerStatuses") or ()}
    for before in (False, True):
        for one in _containers(status):
            state = one.get("lastState") if before else one.get("state")
            ended = (state or {}).get("terminated")
            if ended and not (one["name"] in init and ended.get("exitCode") == 0):
                return ended, one["name"]
    return {}, ""


# --- queues ------------------------------------------------------------------------------------


def workload_state(item: QueueObject) -> QueueState:
    """Kueue's Workload of a RayCluster."""
    conditions = _by_type((item.get("status") or {}).get("conditions"))
    evicted, reserved = conditions.get("Evicted", _NOT_SAID), conditions.get("QuotaReserved", _NOT_SAID)
    admitted = _holds(conditions, "Admitted")
    says = evicted if evicted.get("status") == "True" and not admitted else reserved
    checks = conditions.get("Admitted", _NOT_SAID)
    if not admitted and reserved.get("status") == "True":
        says = checks
    meta, notes = item["metadata"], item["metadata"].get("annotations") or {}
    view = QueueView(
        admitted=admitted,
        reason=str(says.get("reason") or ""),
        message=_cut(says.get("message")),
        object=f"Workload {meta['name']}",
        workload=WorkloadView(
            meta["name"], str(meta["uid"]), notes.get(BOOST_ANNOTATION, ""), notes.get(SAVED_ANNOTATION, "")
        ),
    )
    return QueueState(view, _owner_uid(item))


def pod_group_state(item: QueueObject) -> QueueState:
    """Volcano's PodGroup of a RayCluster."""
    status = item.get("status") or {}
    unschedulable = _by_type(status.get("conditions")).get("Unschedulable", _NOT_SAID)
    phase = str(status.get("phase") or "Pending")
    blocked = unschedulable.get("status") == "True"
    admitted = phase in ("Running", "Completed") or (phase == "Inqueue" and not blocked)
    view = QueueView(
        admitted=admitted,
        reason="" if admitted else str(unschedulable.get("reason") or phase),
        message="" if admitted else _cut(unschedulable.get("message")),
        object=f"PodGroup {item['metadata']['name']}",
    )
    return QueueState(view, _owner_uid(item))


# --- parts -------------------------------------------------------------------------------------


def unix_seconds(text: str) -> float:
    """Unix seconds of an RFC 3339 time."""
    return datetime.fromisoformat(text).timestamp()


def _owner_uid(item: KubeObject) -> str:
    owner = controller_of(item)
    return "" if owner is None else owner["uid"]


def _labels(item: KubeObject) -> Mapping[str, str]:
    return item["metadata"].get("labels") or {}


def _by_type(conditions: Iterable[Condition] | None) -> dict[str, Condition]:
    return {condition["type"]: condition for condition in conditions or ()}


def _holds(conditions: Mapping[str, Condition], kind: str) -> bool:
    return conditions.get(kind, _NOT_SAID).get("status") == "True"


def _cut(text: str | None) -> str:
    return str(text or "")[:_MESSAGE]
