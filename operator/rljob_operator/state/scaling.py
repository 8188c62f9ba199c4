"""More or fewer nodes with engines while the job runs.

The driver gets the number that is wanted. More pods are asked for at once, and engines begin where they join. Fewer
come later: a pod goes when the driver says that nothing of the job is on its node any more.
"""

from __future__ import annotations

from rljob_api import derived
from rljob_operator.state.observed import EngineGroupView, Observed, PodView
from rljob_operator.state.plan import ScaleEngines, WantEngineNodes
from rljob_operator.state.plan_builder import PlanBuilder


def spare_pods(observed: Observed) -> int:
    """Pods with engines that a job can begin and go on without."""
    group = observed.cluster.engine_group if observed.cluster is not None else None
    spec = observed.job.spec
    if group is None or spec is None or not derived.is_elastic(spec):
        return 0
    least, _ = derived.engine_node_bounds(spec)
    return max(0, group.replicas - least)


def scale_engines(plan: PlanBuilder) -> None:
    """Bring driver and RayCluster to the number of nodes that `resources.rollout.nodes` says now."""
    cluster = plan.cluster
    group = cluster.engine_group if cluster is not None else None
    if cluster is None or group is None or not derived.is_elastic(plan.spec) or plan.job.problem or plan.spec.suspend:
        return
    wanted, driver = derived.engine_nodes(plan.spec), plan.driver
    engines = driver.engine_nodes if driver is not None and not driver.stopping else None
    if engines is not None and engines.wanted != wanted:
        plan.act(WantEngineNodes(wanted))
    if wanted > group.replicas:
        _scale(plan, cluster.uid, group, wanted)
    elif wanted < group.replicas:
        free = _unused(plan)[: group.replicas - wanted]
        if free:
            _scale(plan, cluster.uid, group, group.replicas - len(free), tuple(pod.name for pod in free))


def _scale(plan: PlanBuilder, uid: str, group: EngineGroupView, replicas: int, pods: tuple[str, ...] = ()) -> None:
    plan.act(ScaleEngines(uid, group, replicas, pods))
    which = f"; {', '.join(pods)} can go" if pods else ""
    plan.note("Normal", "EnginesScaled", f"The pods with engines are {replicas} now, not {group.replicas}{which}.")


def _unused(plan: PlanBuilder) -> list[PodView]:
    """Pods of engines on which nothing of the job is, those first that are not ready, then the newest."""
    own = plan.own_cluster
    assert own is not None
    pods = [
        pod
        for pod in plan.observed.pods
        if pod.group == derived.ENGINE_GROUP and pod.cluster_uid == own.uid and not pod.deleting
    ]
    if plan.attempt is not None:
        engines = plan.driver.engine_nodes if plan.driver is not None else None
        if engines is None or engines.wanted != derived.engine_nodes(plan.spec):
            return []
        pods = [pod for pod in pods if pod.address not in engines.in_use]
    return sorted(pods, key=lambda pod: (pod.ready, -(pod.scheduled or plan.now), pod.name))
