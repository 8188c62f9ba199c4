"""Doing what a plan says: each write by server-side apply, and known to the caches as soon as it is answered."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from rljob_api.derived import ENGINE_GROUP
from rljob_api.job import GROUP, KIND, VERSION
from rljob_api.json_types import Json
from rljob_api.wire.names import DRIVER_TOKEN_KEY
from rljob_operator.kubernetes_objects import Item, Manifest, with_metadata
from rljob_operator.ray.http import NoAnswer
from rljob_operator.render import (
    RenderError,
    policy_name,
    policy_to_apply,
    render_cluster,
    render_secret,
    secret_name,
    submission,
)
from rljob_operator.settings import Settings
from rljob_operator.shell.api.client import ApiClient, ApiError
from rljob_operator.shell.api.events import EventRecorder
from rljob_operator.shell.api.metrics import OperatorMetrics
from rljob_operator.shell.api.owners import controller_uid
from rljob_operator.shell.api.resources import NETWORK_POLICIES, RAY_CLUSTERS, RLJOBS, SECRETS, JobKey, Resource
from rljob_operator.shell.api.tokens import Tokens
from rljob_operator.shell.caches.informers import Informers
from rljob_operator.shell.jobs.observe import ObservedJob, Observer
from rljob_operator.shell.jobs.sandboxes import delete_claims, make_claims
from rljob_operator.state.causes import Cause
from rljob_operator.state.checkpoints import without_request
from rljob_operator.state.observed import JobView
from rljob_operator.state.plan import (
    OBJECTS,
    Action,
    AnnotateWorkload,
    ApplyPolicy,
    ApplySecret,
    ClaimSandboxes,
    CreateCluster,
    DeleteCluster,
    DeleteJob,
    Event,
    Plan,
    ReleaseSandboxes,
    RequestCheckpoint,
    ScaleEngines,
    Stop,
    Submit,
    WantEngineNodes,
)
from rljob_operator.state.preemption import BOOST_ANNOTATION, SAVED_ANNOTATION
from rljob_operator.state.refusals import refusal
from rljob_operator.state.sandboxes import sandbox_urls, warm_pool

_TOKEN_BYTES = 32
_RENEWAL_SECONDS = 4.0
"""Least time between two renewals of a job's NetworkPolicy: two operators with the same jobs (an old installation was
left behind) would otherwise take it from each other as fast as they can."""


class ActionFailed(Exception):
    """An action of a plan was not done; the rest of the plan is left for the next time.

    Attributes:
        reason: one word for an Event.
        told (to the user, as an Event): nothing will change by itself soon.
        retry_after: seconds that the server asked to wait.
        refused: what the status should say of an object that the job needs.
    """

    def __init__(
        self, reason: str, message: str, told: bool, retry_after: float | None = None, refused: Cause | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.told = told
        self.retry_after = retry_after
        self.refused = refused


class Conflict(Exception):
    """Something changed while the plan was made; the job is to be looked at again."""


class Executor:
    """Carries out plans.

    Args:
        client: the API server.
        informers: the caches.
        tokens: the bearer tokens.
        observer: holds the addresses of heads and drivers.
        events: where Events go.
        metrics: where writes are counted.
        settings: render settings and the throttle.
        check: raises when this replica may not act (any more); called before each write.
    """

    def __init__(
        self,
        client: ApiClient,
        informers: Informers,
        tokens: Tokens,
        observer: Observer,
        events: EventRecorder,
        metrics: OperatorMetrics,
        settings: Settings,
        check: Callable[[], None],
    ) -> None:
        self._client = client
        self._informers = informers
        self._tokens = tokens
        self._observer = observer
        self._events = events
        self._metrics = metrics
        self._settings = settings
        self._check = check
        self._written: dict[JobKey, float] = {}
        self._renewed: dict[JobKey, float] = {}

    async def carry_out(self, look: ObservedJob, plan: Plan) -> float | None:
        """Do the actions, write the status, record the events.

        Returns:
            Seconds after which a status that was held back should be written; None: the plan's status is stored.

        Raises:
            ActionFailed: an action was not done.
            Conflict: the RLJob is another one than was looked at.
            ApiError: the status was not written.
        """
        retry_after = await self._write_status(look, plan) if plan.status_first else None
        for action in plan.actions:
            self._check()
            try:
                await self._act(look, action)
            except ActionFailed as failed:
                refused = _HOLDS_NOTHING_BACK.get(type(action))
                if refused is None:
                    raise
                if isinstance(action, RequestCheckpoint):
                    plan = without_request(plan, look.observed.job.status)
                self._events.record(look.observed.job, Event("Warning", refused, str(failed)))
        if not plan.status_first and not any(isinstance(action, DeleteJob) for action in plan.actions):
            retry_after = await self._write_status(look, plan)
        # What an Event tells is stored first: else the next plan would tell it again.
        for event in plan.events if retry_after is None else ():
            self._events.record(look.observed.job, event)
        return retry_after

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self._written.pop(key, None)
        self._renewed.pop(key, None)

    # --- the status -------------------------------------------------------------------------

    async def _write_status(self, look: ObservedJob, plan: Plan) -> float | None:
        job = look.observed.job
        if plan.status.model_copy(update={"writes": job.status.writes}) == job.status:
            return None
        key = JobKey(job.namespace, job.name)
        wait = self._written.get(key, -1e9) + self._settings.status_seconds - time.monotonic()
        if not plan.urgent and wait > 0:
            return wait
        self._check()
        new = plan.status.model_dump(mode="json", by_alias=True, exclude_none=True) | {"writes": job.status.writes + 1}
        meta = {"name": job.name, "namespace": job.namespace, "resourceVersion": str(look.version)}
        body: Manifest = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": meta, "status": new}
        try:
            item = await self._client.apply(RLJOBS, job.namespace, job.name, body, subresource="status")
        except ApiError as error:
            if error.code == 409:
                await self._refresh(key)
                raise Conflict(str(error)) from None
            if error.code == 404:
                raise Conflict("it was deleted") from None
            raise
        self._written[key] = time.monotonic()
        self._metrics.writes.labels("status").inc()
        self._informers.jobs.learn(item, tell=False)
        return None

    async def _refresh(self, key: JobKey) -> None:
        """Do not wait for the watch to show what the server already has."""
        try:
            self._informers.jobs.learn(await self._client.get(RLJOBS, key.namespace, key.name))
        except ApiError as error:
            if error.code != 404:
                raise

    # --- the actions ------------------------------------------------------------------------

    async def _act(self, look: ObservedJob, action: Action) -> None:
        job = look.observed.job
        try:
            match action:
                case ApplySecret():
                    await self._make_secret(job)
                case ApplyPolicy():
                    await self._apply_policy(job)
                case CreateCluster():
                    await self._create_cluster(job)
                case DeleteCluster(uid=uid, wait=wait):
                    await self._delete_cluster(job, uid, wait)
                case DeleteJob():
                    await self._delete_job(job)
                case ScaleEngines():
                    await self._scale_engines(job, action)
                case AnnotateWorkload():
                    await self._annotate_workload(job, action)
                case ClaimSandboxes(names=names):
                    self._count("sandboxclaims", await make_claims(self._client, job, names))
                case ReleaseSandboxes(claims=claims):
                    self._count("sandboxclaims", await delete_claims(self._client, job, claims))
                case Submit() | Stop() | RequestCheckpoint() | WantEngineNodes():
                    await self._ask_job(look, action)
        except ApiError as error:
            what = f"{_WORDS[type(action)]} failed"
            cause = refusal(what, str(error)) if isinstance(action, OBJECTS) and error.code not in (0, 429) else None
            raise ActionFailed(
                "RequestRefused", f"{what}: {error}", _is_final(error), error.retry_after, cause
            ) from None
        except RenderError as error:
            raise ActionFailed("InvalidSpec", f"{_WORDS[type(action)]} failed: {error}", True) from None
        except NoAnswer as error:
            raise ActionFailed("NoAnswer", f"{_WORDS[type(action)]} failed: {error}", 400 <= error.code < 500) from None

    def _count(self, plural: str, writes: int) -> None:
        self._metrics.writes.labels(plural).inc(writes)

    async def _apply(self, resource: Resource[Item], job: JobView, name: str, body: Manifest) -> Item:
        item = await self._client.apply(resource, job.namespace, name, body)
        self._metrics.writes.labels(resource.plural).inc()
        return item

    async def _create_cluster(self, job: JobView) -> None:
        """Created, not applied: to apply over one that somebody else made under this name would take it from them."""
        body = render_cluster(job, self._settings.render, checked=not job.problem)
        try:
            # Strict: a field that the CRD does not have would be dropped without a word, that of Ray's token too.
            item = await self._client.create(RAY_CLUSTERS, job.namespace, body, strict=True)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
        else:
            self._metrics.writes.labels("rayclusters").inc()
            self._informers.clusters.learn(item)
            return
        try:
            self._informers.clusters.learn(await self._client.get(RAY_CLUSTERS, job.namespace, job.name))
        except ApiError as error:
            if error.code != 404:
                raise
        raise Conflict("there is a RayCluster of this name that the watch has not shown yet")

    async def _make_secret(self, job: JobView) -> None:
        key, name = JobKey(job.namespace, job.name), secret_name(job.name)
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        try:
            await self._client.create(SECRETS, job.namespace, render_secret(job, token))
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            # Created, not applied: pods that run have the token that is there, so that it is never replaced.
            self._tokens.forget(key)
            if await self._tokens.read(key, job.uid, name, DRIVER_TOKEN_KEY) is None:
                raise ActionFailed(
                    "SecretInTheWay",
                    f"Secret {name} exists and is not this job's, or has no key {DRIVER_TOKEN_KEY}; delete it, or give "
                    "the job another name. (That of a deleted job of this name goes by itself.)",
                    told=True,
                ) from None
            return
        self._metrics.writes.labels("secrets").inc()
        self._tokens.learn(key, job.uid, name, DRIVER_TOKEN_KEY, token)

    async def _apply_policy(self, job: JobView) -> None:
        name, there = policy_name(job.name), self._informers.policy_of(job) is not None
        policy = policy_to_apply(job, self._settings.render, there)
        if policy is None:
            return
        version = str(self._informers.policies.version(job.namespace, name)) if there else None
        if version is None:
            try:
                self._informers.policies.learn(await self._client.create(NETWORK_POLICIES, job.namespace, policy))
            except ApiError as error:
                if error.reason != "AlreadyExists":
                    raise
                version = await self._version_of_policy(job, name)
            else:
                self._metrics.writes.labels("networkpolicies").inc()
                return
        await self._renew_policy(job, policy, version)

    async def _version_of_policy(self, job: JobView, name: str) -> str:
        """resourceVersion of a policy that the watch has not shown: it is behind, or the policy has lost its labels."""
        item = await self._client.get(NETWORK_POLICIES, job.namespace, name)
        if controller_uid(item) != job.uid:
            raise ActionFailed(
                "PolicyInTheWay",
                f"NetworkPolicy {name} exists and is not this job's; delete it, or give the job another name. "
                "(That of a deleted job of this name goes by itself.)",
                told=True,
            )
        return str(item["metadata"]["resourceVersion"])

    async def _renew_policy(self, job: JobView, policy: Manifest, version: str) -> None:
        """Bring the job's policy up to date, if it is still the one that was seen."""
        key = JobKey(job.namespace, job.name)
        if time.monotonic() - self._renewed.get(key, -1e9) < _RENEWAL_SECONDS:
            return  # The next look does it.
        self._renewed[key] = time.monotonic()
        body = with_metadata(policy, resourceVersion=version)
        self._informers.policies.learn(await self._apply(NETWORK_POLICIES, job, policy_name(job.name), body))

    async def _delete_cluster(self, job: JobView, uid: str, wait: bool) -> None:
        try:
            answer = await self._client.delete(RAY_CLUSTERS, job.namespace, job.name, uid, wait=wait)
        except ApiError as error:
            if error.code not in (404, 409):
                raise
            answer = None
        else:
            self._metrics.writes.labels("rayclusters").inc()
        if answer is None:
            self._informers.clusters.forget(job.namespace, job.name, uid)
        else:
            self._informers.clusters.learn(answer)

    async def _scale_engines(self, job: JobView, action: ScaleEngines) -> None:
        group = f"/spec/workerGroupSpecs/{action.seen.index}"
        patch: list[Json] = [
            {"op": "test", "path": "/metadata/uid", "value": action.uid},
            {"op": "test", "path": f"{group}/groupName", "value": ENGINE_GROUP},
            {"op": "test", "path": f"{group}/replicas", "value": action.seen.replicas},
            {"op": "replace", "path": f"{group}/replicas", "value": action.replicas},
            # KubeRay would choose pods by chance.
            {"op": "add", "path": f"{group}/scaleStrategy", "value": {"workersToDelete": list(action.pods)}},
        ]
        try:
            item = await self._client.patch(RAY_CLUSTERS, job.namespace, job.name, patch)
        except ApiError as error:
            if error.code != 422:
                raise
            raise Conflict(f"the RayCluster is not as it was seen: {error}") from None
        self._metrics.writes.labels("rayclusters").inc()
        self._informers.clusters.learn(item)

    async def _annotate_workload(self, job: JobView, action: AnnotateWorkload) -> None:
        workloads = self._informers.resource_of("workloads")
        if workloads is None:
            raise Conflict("Kueue's kinds are no more")
        notes = {BOOST_ANNOTATION: str(action.boost), SAVED_ANNOTATION: action.last_checkpoint}
        body: Manifest = {
            "apiVersion": f"{workloads.group}/{workloads.version}",
            "kind": "Workload",
            # The UID: else a Workload that is gone would be made anew, and another one of this name be written to.
            "metadata": {
                "name": action.name,
                "namespace": job.namespace,
                "uid": action.uid,
                "annotations": {key: value for key, value in notes.items() if value},
            },
        }
        try:
            item = await self._apply(workloads, job, action.name, body)
        except ApiError as error:
            if error.code not in (404, 409):
                raise
            raise Conflict(f"Workload {action.name} is another one by now: {error}") from None
        self._informers.queues["workloads"].learn(item, tell=False)

    async def _delete_job(self, job: JobView) -> None:
        try:
            await self._client.delete(RLJOBS, job.namespace, job.name, job.uid)
        except ApiError as error:
            if error.code not in (404, 409):
                raise
        else:
            self._metrics.writes.labels("rljobs").inc()

    async def _ask_job(self, look: ObservedJob, action: Submit | Stop | RequestCheckpoint | WantEngineNodes) -> None:
        job, cluster = look.observed.job, look.cluster
        key = JobKey(job.namespace, job.name)
        if cluster is None or cluster.owner_uid != job.uid:
            raise NoAnswer("the job has no RayCluster")
        if isinstance(action, RequestCheckpoint):
            await (await self._observer.driver(key, job, cluster)).checkpoint()
        elif isinstance(action, WantEngineNodes):
            await (await self._observer.driver(key, job, cluster)).want_engine_nodes(action.nodes)
        elif isinstance(action, Stop):
            await (await self._observer.ray_jobs(key, cluster)).stop(action.id)
        else:
            sandboxes = sandbox_urls(look.observed)
            if warm_pool(job.spec) is not None and not sandboxes:
                raise NoAnswer("not all sandboxes are ready")
            body = submission(job, action.attempt, self._settings.render, sandboxes)
            await (await self._observer.ray_jobs(key, cluster)).submit({**body, "submission_id": action.id})


_WORDS: dict[type[Action], str] = {
    ApplySecret: "Making the Secret with the driver's token",
    ApplyPolicy: "Applying the head's NetworkPolicy",
    CreateCluster: "Making the RayCluster",
    DeleteCluster: "Deleting the RayCluster",
    DeleteJob: "Deleting the job after its time to live",
    Submit: "Submitting the driver",
    Stop: "Stopping the driver",
    RequestCheckpoint: "Asking the driver for a checkpoint",
    WantEngineNodes: "Asking the driver for another number of nodes with engines",
    AnnotateWorkload: "Telling Kueue what a preemption would cost",
    ScaleEngines: "Changing the number of pods with engines",
    ClaimSandboxes: "Making the SandboxClaims",
    ReleaseSandboxes: "Deleting SandboxClaims",
}

_HOLDS_NOTHING_BACK: dict[type[Action], str] = {
    RequestCheckpoint: "CheckpointNotRequested",
    WantEngineNodes: "EnginesNotScaled",
    AnnotateWorkload: "PriorityNotBoosted",
    ReleaseSandboxes: "SandboxesNotReleased",
}
"""Actions whose refusal must not hold back what else there is to do and to tell, with the reason of the Event."""


def _is_final(error: ApiError) -> bool:
    """Refusals (quota, admission, rights, a webhook that does not answer) stay until somebody does something; the rest
    goes by itself."""
    return (400 <= error.code < 500 and error.code not in (409, 429)) or "webhook" in str(error)
