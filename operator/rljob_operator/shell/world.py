"""The caches, and the watches that keep them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from rljob_operator.render import policy_name
from rljob_operator.shell.cache import Cache
from rljob_operator.shell.metrics import OperatorMetrics
from rljob_operator.shell.reflector import Reflector, WatchTimes
from rljob_operator.shell.resources import (
    FIELD_MANAGER,
    JOB_LABEL,
    MANAGED_BY_LABEL,
    NETWORK_POLICIES,
    PODS,
    RAY_CLUSTERS,
    RLJOBS,
    JobKey,
    Resource,
)
from rljob_operator.shell.rest import ApiClient, ApiError
from rljob_operator.shell.views import (
    ClusterState,
    PolicyState,
    QueueState,
    cluster_state,
    job_text,
    labelled_key,
    own_key,
    pod_group_state,
    pod_view,
    policy_state,
    queue_key,
    ray_pod_key,
    telling,
    workload_state,
)
from rljob_operator.state.observed import JobView, PodView

logger = logging.getLogger(__name__)
OPTIONAL_KINDS = (
    ("kueue.x-k8s.io", "workloads", workload_state),
    ("scheduling.volcano.sh", "podgroups", pod_group_state),
)


class World:
    """What the operator knows of the cluster.

    RayClusters are watched without a selector: one that somebody else made under a job's name must be seen before it
    is applied over. Only a few fields of each are kept.

    Args:
        client: the API server.
        metrics: the watches' metrics.
        changed: called with the job of each object that changed.
        namespaces: watched namespaces; empty: all.
        times: limits of the watches.
    """

    def __init__(
        self,
        client: ApiClient,
        metrics: OperatorMetrics,
        changed: Callable[[JobKey], None],
        namespaces: Sequence[str] = (),
        times: WatchTimes | None = None,
    ) -> None:
        self.jobs: Cache[bytes] = Cache(own_key, job_text, changed)
        self.clusters: Cache[ClusterState] = Cache(own_key, cluster_state, changed)
        self.pods: Cache[PodView] = Cache(ray_pod_key, pod_view, changed, telling)
        self.policies: Cache[PolicyState] = Cache(labelled_key, policy_state, changed)
        self.queues: dict[str, Cache[QueueState]] = {
            plural: Cache(queue_key, state_of, changed) for _, plural, state_of in OPTIONAL_KINDS
        }
        self._client = client
        self._metrics = metrics
        self._namespaces: Sequence[str | None] = namespaces or (None,)
        self._times = times
        self.watches: list[Reflector] = [
            *self._reflectors(RLJOBS, self.jobs),
            *self._reflectors(RAY_CLUSTERS, self.clusters),
            *self._reflectors(PODS, self.pods, f"ray.io/cluster,{JOB_LABEL}"),
            *self._reflectors(NETWORK_POLICIES, self.policies, f"{MANAGED_BY_LABEL}={FIELD_MANAGER}"),
        ]
        self.optional: dict[str, list[Reflector]] = {}

    def policy_of(self, job: JobView) -> PolicyState | None:
        """The NetworkPolicy of the job's head; never somebody else's."""
        found = self.policies.get(job.namespace, policy_name(job.name))
        return found if found is not None and found.owner_uid == job.uid else None

    def _reflectors(
        self, resource: Resource, cache: Cache, selector: str | None = None, optional: bool = False
    ) -> list[Reflector]:
        return [
            Reflector(
                self._client,
                resource,
                cache,
                self._metrics,
                selector=selector,
                namespace=namespace,
                times=self._times,
                optional=optional,
            )
            for namespace in self._namespaces
        ]

    async def discover(self) -> dict[str, list[Reflector]]:
        """Look which of Kueue's and Volcano's kinds the API server has.

        Returns:
            The watches that are to be begun, by kind.
        """
        found = {}
        for group, plural, _ in OPTIONAL_KINDS:
            if plural in self.optional:
                continue
            version = await self._version_with(group, plural)
            if version is not None:
                watches = self._reflectors(Resource(group, version, plural), self.queues[plural], optional=True)
                self.optional[plural] = found[plural] = watches
        return found

    async def _version_with(self, group: str, plural: str) -> str | None:
        try:
            versions = (await self._client.request("GET", f"/apis/{group}"))["versions"]
            for version in versions:
                path = f"/apis/{group}/{version['version']}"
                listed = (await self._client.request("GET", path))["resources"]
                if any(resource["name"] == plural for resource in listed):
                    return str(version["version"])
        except ApiError as error:
            if error.code != 404:
                logger.warning("looking for %s.%s: %s", plural, group, error)
        except (KeyError, TypeError) as error:
            logger.warning("looking for %s.%s: the answer has no %s", plural, group, error)
        return None

    def ended(self, plural: str) -> None:
        """A watch of an optional kind ended because the kind is not there (any more): it is looked for again later."""
        problems = {watch.problem for watch in self.optional.pop(plural) if watch.problem}
        logger.info("not watched: %s", "; ".join(sorted(problems)))
        self.queues[plural].clear()

    @property
    def all_watches(self) -> list[Reflector]:
        """Those of the kinds that must be there, then those that are there."""
        return [*self.watches, *(watch for watches in self.optional.values() for watch in watches)]

    @property
    def problem(self) -> str:
        """Why the caches cannot be trusted; empty when they can."""
        for watch in self.all_watches:
            if not watch.young:
                state = "is silent" if watch.synced.is_set() else "was not read yet"
                return watch.problem or f"{watch.resource} in {watch.namespace or 'all namespaces'} {state}"
        return ""

    def measure(self) -> None:
        """Bring the gauges up to date."""
        ages: dict[str, float] = {}
        for watch in self.all_watches:
            ages[str(watch.resource)] = max(watch.age, ages.get(str(watch.resource), 0.0))
        for name, age in ages.items():
            self._metrics.watch_age.labels(name).set(age)
        caches: dict[str, Cache] = {"rljobs": self.jobs, "rayclusters": self.clusters, "pods": self.pods}
        for name, cache in {**caches, "networkpolicies": self.policies, **self.queues}.items():
            self._metrics.cached.labels(name).set(len(cache))
