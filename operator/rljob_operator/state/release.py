"""Giving the RayCluster back, and what may still run in its pods.

It is deleted in the foreground: it stays until its pods are gone, so that no other one of its name begins before. A pod
whose node cannot be reached is not waited for, since it would stay for ever. What runs in it may go on, but commits
nothing any more from the next attempt's beginning: that one's driver fences it off (docs/faults.md).
"""

from __future__ import annotations

from rljob_operator.state.observed import ClusterView, PodView
from rljob_operator.state.plan import DeleteCluster
from rljob_operator.state.plan_builder import PlanBuilder
from rljob_operator.state.timing import LATE_POD_SECONDS


def release_cluster(plan: PlanBuilder) -> bool:
    """Delete the job's RayCluster, so that its devices are free; tells whether there still is one."""
    cluster = plan.own_cluster
    if cluster is None:
        return False
    if not cluster.deleting:
        plan.set(cluster=plan.cluster_status.model_copy(update={"released_uid": cluster.uid}))
        plan.act(DeleteCluster(cluster.uid), status_first=True)
    elif _is_held(plan, cluster):
        plan.act(DeleteCluster(cluster.uid, wait=False), status_first=True)
    return True


def former_head_ends(plan: PlanBuilder) -> bool:
    """Whether another head pod is still ending: its driver may still write to the run folder."""
    return any(_ends(plan, pod) for pod in plan.heads)


def _is_held(plan: PlanBuilder, cluster: ClusterView) -> bool:
    """Whether nobody will know when the pods that are left are gone."""
    left = [pod for pod in plan.observed.pods if pod.cluster_uid == cluster.uid]
    return bool(left) and all(pod.deleting and not _ends(plan, pod) for pod in left)


def _ends(plan: PlanBuilder, pod: PodView) -> bool:
    """Whether a pod was deleted and will be known to be gone: not on a lost node, nor long after its time."""
    late = pod.deleted is not None and plan.now >= pod.deleted + LATE_POD_SECONDS
    return pod.deleting and not pod.node_lost and not late
