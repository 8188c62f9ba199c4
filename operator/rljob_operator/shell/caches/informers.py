"""The caches, and what Kopf watches to keep them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TypeVar, cast

from rljob_operator.kubernetes_objects import (
    ApiGroup,
    ApiResourceList,
    Item,
    KubeObject,
    PodObject,
    QueueObject,
    RayClusterObject,
    RLJobObject,
    WatchEvent,
)
from rljob_operator.render import policy_name
from rljob_operator.shell.api.client import ApiClient, ApiError
from rljob_operator.shell.api.metrics import OperatorMetrics
from rljob_operator.shell.api.resources import (
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
from rljob_operator.shell.caches.cache import Cache
from rljob_operator.shell.caches.informer import Informer, WatchTimes
from rljob_operator.shell.caches.kept_job import job_text
from rljob_operator.shell.caches.views import (
    ClusterState,
    PolicyState,
    QueueState,
    cluster_state,
    explains_failure,
    labelled_key,
    own_key,
    pod_group_state,
    pod_view,
    policy_state,
    queue_key,
    ray_pod_key,
    workload_state,
)
from rljob_operator.state.observed import JobView, PodView

logger = logging.getLogger(__name__)
Value = TypeVar("Value")
OPTIONAL_KINDS = (
    ("kueue.x-k8s.io", "workloads", workload_state),
    ("scheduling.volcano.sh", "podgroups", pod_group_state),
)


class Informers:
    """Caches of the cluster's objects.

    RayClusters are watched without a selector: one that somebody else made under a job's name must be seen before it
    is applied over. Only a few fields of each are kept.

    Args:
        client: the API server.
        metrics: the watches' metrics.
        changed: called with the job of each object that changed.
        pod_changed: the same of pods.
        namespaces: watched namespaces; empty: all.
        times: limits of the watches.
    """

    def __init__(
        self,
        client: ApiClient,
        metrics: OperatorMetrics,
        changed: Callable[[JobKey], None],
        pod_changed: Callable[[JobKey], None],
        namespaces: Sequence[str] = (),
        times: WatchTimes | None = None,
    ) -> None:
        self.jobs: Cache[RLJobObject, bytes] = Cache(own_key, job_text, changed)
        self.clusters: Cache[RayClusterObject, ClusterState] = Cache(own_key, cluster_state, changed)
        self.pods: Cache[PodObject, PodView] = Cache(ray_pod_key, pod_view, pod_changed, explains_failure)
        self.policies: Cache[KubeObject, PolicyState] = Cache(labelled_key, policy_state, changed)
        self.queues: dict[str, Cache[QueueObject, QueueState]] = {
            plural: Cache(queue_key, state_of, changed) for _, plural, state_of in OPTIONAL_KINDS
        }
        self.lost = asyncio.Event()
        """Set when a kind that need not be there is not."""
        self._client = client
        self._metrics = metrics
        self._namespaces: Sequence[str | None] = namespaces or (None,)
        self._times = times
        self.needed: list[Informer] = [
            *self._of_kind(RLJOBS, self.jobs),
            *self._of_kind(RAY_CLUSTERS, self.clusters),
            *self._of_kind(PODS, self.pods, f"ray.io/cluster,{JOB_LABEL}"),
            *self._of_kind(NETWORK_POLICIES, self.policies, f"{MANAGED_BY_LABEL}={FIELD_MANAGER}"),
        ]
        self.optional: dict[str, list[Informer]] = {}

    def __iter__(self) -> Iterator[Informer]:
        """Informers of the required kinds, then those of the optional kinds that exist."""
        return chain(self.needed, *self.optional.values())

    def now(self) -> float:
        """Unix seconds by the API server's clock."""
        return self._client.now()

    def policy_of(self, job: JobView) -> PolicyState | None:
        """The NetworkPolicy of the job's head; never somebody else's."""
        found = self.policies.get(job.namespace, policy_name(job.name))
        return found if found is not None and found.owner_uid == job.uid else None

    def at(self, path: str) -> Informer | None:
        """The one whose kind is listed and watched at this path."""
        return next((one for one in self if path == one.resource.path(one.namespace)), None)

    def take(self, group: str, plural: str, namespace: str | None, event: WatchEvent) -> None:
        """Take in an event of a kind, of an object in this namespace."""
        for one in self:
            if (one.resource.group, one.resource.plural) == (group, plural) and one.namespace in (None, namespace):
                one.take(event["type"], event["object"])

    def _of_kind(
        self,
        resource: Resource[Item],
        cache: Cache[Item, Value],
        selector: str | None = None,
        lost: Callable[[], None] = lambda: None,
    ) -> list[Informer[Item, Value]]:
        return [
            Informer(
                resource, cache, self._metrics, selector=selector, namespace=namespace, times=self._times, lost=lost
            )
            for namespace in self._namespaces
        ]

    async def discover(self) -> None:
        """Look which of Kueue's and Volcano's kinds the API server has."""
        for group, plural, _ in OPTIONAL_KINDS:
            if plural in self.optional:
                continue
            version = await self._version_with(group, plural)
            if version is not None:
                resource: Resource[QueueObject] = Resource(group, version, plural, {})
                self.optional[plural] = self._of_kind(resource, self.queues[plural], lost=self.lost.set)

    async def _version_with(self, group: str, plural: str) -> str | None:
        try:
            versions = cast("ApiGroup", await self._client.request("GET", f"/apis/{group}"))["versions"]
            for version in versions:
                path = f"/apis/{group}/{version['version']}"
                listed = cast("ApiResourceList", await self._client.request("GET", path))["resources"]
                if any(resource["name"] == plural for resource in listed):
                    return str(version["version"])
        except ApiError as error:
            if error.code != 404:
                logger.warning("looking for %s.%s: %s", plural, group, error)
        except (KeyError, TypeError) as error:
            logger.warning("looking for %s.%s: the answer has no %s", plural, group, error)
        return None

    def resource_of(self, plural: str) -> Resource[QueueObject] | None:
        """A kind that need not be there, in the version that is watched; None: it is not there."""
        informers = self.optional.get(plural)
        return informers[0].resource if informers else None

    def drop_lost(self) -> None:
        """Forget the kinds that are not there (any more); they are looked for again later."""
        self.lost.clear()
        for plural, informers in tuple(self.optional.items()):
            if any(one.is_missing for one in informers):
                logger.info("not watched: %s", "; ".join(sorted({one.problem for one in informers if one.problem})))
                del self.optional[plural]
                self.queues[plural].clear()

    @property
    def problem(self) -> str:
        """Why the caches cannot be trusted; empty when they can."""
        for one in self:
            if not one.is_fresh:
                return one.problem or f"{one} {'is silent' if one.synced.is_set() else 'was not read yet'}"
        return ""

    def measure(self) -> None:
        """Bring the gauges up to date."""
        ages: dict[str, float] = {}
        for one in self:
            ages[str(one.resource)] = max(one.age, ages.get(str(one.resource), 0.0))
        for name, age in ages.items():
            self._metrics.watch_age.labels(name).set(age)
        caches: dict[str, Cache] = {"rljobs": self.jobs, "rayclusters": self.clusters, "pods": self.pods}
        for name, cache in {**caches, "networkpolicies": self.policies, **self.queues}.items():
            self._metrics.cached.labels(name).set(len(cache))
