"""Looking at one job: the caches, and while a driver should run its head and the driver itself."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import aiohttp

from rljob_api.spec import RLJobSpec
from rljob_api.status import AttemptStatus, JobPhase, RLJobStatus
from rljob_api.validation import ManifestError
from rljob_api.wire.names import DRIVER_TOKEN_KEY, RAY_TOKEN_KEY
from rljob_api.wire.steps_page import LARGEST_PAGE_BYTES
from rljob_api.wire.values import WireError
from rljob_operator.kubernetes_objects import RLJobObject
from rljob_operator.metrics import JobMetricsStore
from rljob_operator.ray.driver import Driver
from rljob_operator.ray.http import AnswerTooLarge, NoAnswer
from rljob_operator.ray.jobs import RayJobs
from rljob_operator.render import (
    check_renderable,
    head_service_name,
    policy_digest,
    policy_to_apply,
    secret_name,
)
from rljob_operator.settings import Settings
from rljob_operator.shell.api.client import ApiClient, ApiError
from rljob_operator.shell.api.metrics import OperatorMetrics
from rljob_operator.shell.api.resources import JobKey
from rljob_operator.shell.api.tokens import Tokens
from rljob_operator.shell.caches.informers import Informers
from rljob_operator.shell.caches.kept_job import TooLarge, check_kept, kept_job
from rljob_operator.shell.caches.names_taken import names_taken
from rljob_operator.shell.caches.spec_cache import SpecCache
from rljob_operator.shell.caches.stored_spec import read_spec
from rljob_operator.shell.caches.views import ClusterState, job_view
from rljob_operator.shell.jobs.sandboxes import read_claims
from rljob_operator.state.causes import Cause
from rljob_operator.state.observed import (
    ClusterView,
    DriverView,
    GonePod,
    JobView,
    Observed,
    QueueView,
    SandboxesView,
    SubmissionView,
)
from rljob_operator.state.queue_label import by_queue_label
from rljob_operator.state.sandboxes import warm_pool
from rljob_operator.state.status_text import clean

logger = logging.getLogger(__name__)

_REFUSED = (401, 403)
_VOUCHED_SECONDS = 60.0
_SMALL_PAGE_BYTES = 2**20
"""All workers at once may read a page of this size."""


@dataclass(frozen=True, slots=True)
class ObservedJob:
    """A job as it was found, and what the shell needs beside that to write."""

    observed: Observed
    version: int
    """resourceVersion of the RLJob that was looked at."""
    cluster: ClusterState | None


@dataclass(frozen=True, slots=True)
class _Checked:
    uid: str
    generation: int
    fine: bool
    """Valid, and can be rendered with these settings. Else it is checked anew: the CRD may be another one by now."""


class Observer:
    """Makes `Observed` of the caches, of Ray's job API and of the driver's endpoint.

    The last two are asked only while the status says that an attempt is under way, and Ray only once a minute while
    the driver answers.

    Args:
        client: the API server, for what no cache has.
        informers: the caches.
        tokens: the bearer tokens.
        store: where step records are counted.
        session: carries the requests to heads and drivers.
        metrics: where records that cannot be read are counted.
        settings: addresses and deadlines.
    """

    def __init__(
        self,
        client: ApiClient,
        informers: Informers,
        tokens: Tokens,
        store: JobMetricsStore,
        session: aiohttp.ClientSession,
        metrics: OperatorMetrics,
        settings: Settings,
    ) -> None:
        self._client = client
        self._informers = informers
        self._tokens = tokens
        self._store = store
        self._session = session
        self._metrics = metrics
        self._settings = settings
        self._specs = SpecCache()
        self._checked: dict[JobKey, _Checked] = {}
        self._asked: dict[JobKey, tuple[str, float]] = {}
        self._unread: dict[JobKey, str] = {}
        # While they come, large pages of records lie in memory side by side: a few at a time.
        self._catching_up = asyncio.Semaphore(4)
        self._reading: WeakValueDictionary[tuple[str, str, str], asyncio.Lock] = WeakValueDictionary()

    async def observe(self, key: JobKey, refused: Cause | None = None) -> ObservedJob | None:
        """Look at a job; None when it is gone.

        Args:
            key: the job.
            refused: why an object of it was not taken when it was carried out last.

        Raises:
            ApiError: a Secret could not be read.
            ValueError: the stored status is unreadable.
        """
        text = self._informers.jobs.get(*key)
        version = self._informers.jobs.version(*key)
        if text is None or version is None:
            return None
        job = self._job(key, kept_job(text))
        if any(pod.waiting_reason == "CreateContainerConfigError" for pod in self._informers.pods.of_job(key)):
            self._tokens.forget(key)
        submission, submission_error, driver, driver_error = await self._ask(
            key, job, self._informers.clusters.get(*key)
        )
        secret_exists = await self._secret_exists(key, job)
        sandboxes = await self._sandboxes(job, self._informers.clusters.get(*key) is not None)
        # The caches after the answers, which take their time: what ended a driver must not be older news than its end.
        state = self._informers.clusters.get(*key)
        cluster, now = None if state is None else state.for_job(job.uid), self._informers.now()
        observed = Observed(
            job=job,
            cluster=cluster,
            pods=tuple(self._informers.pods.of_job(key)),
            gone_pods=tuple(GonePod(pod, now - age) for age, pod in self._informers.pods.lately_of_job(key)),
            queue=self._queue(key, cluster),
            boosts_priority=self._settings.kueue_priority_boost,
            sandboxes=sandboxes,
            secret_exists=secret_exists,
            refused=refused,
            names_taken=self._names_taken(job) if cluster is None else "",
            policy_current=self._policy_current(job),
            submission=submission,
            submission_error=submission_error,
            driver=driver,
            driver_error=driver_error,
        )
        return ObservedJob(observed, version, state)

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        checked = self._checked.pop(key, None)
        if checked is not None:
            self._specs.drop(checked.uid, checked.generation)
            self._store.forget((*key, checked.uid))
        self._asked.pop(key, None)
        self._unread.pop(key, None)
        self._tokens.forget(key)

    # --- the job itself ---------------------------------------------------------------------

    def _job(self, key: JobKey, item: RLJobObject) -> JobView:
        uid, generation = str(item["metadata"]["uid"]), int(item["metadata"].get("generation", 1))
        checked = self._checked.get(key)
        if checked is not None and checked.uid != uid:
            self.forget(key)
            checked = None
        if checked is not None and checked.generation == generation and checked.fine:
            return by_queue_label(job_view(item, self._spec(item, uid, generation), ""))
        job = self._check(item)
        if checked is not None:
            self._specs.drop(uid, checked.generation)
        self._checked[key] = _Checked(uid, generation, not job.problem)
        return job

    def _check(self, item: RLJobObject) -> JobView:
        try:
            check_kept(item)
            spec, unknown = read_spec(item)
        except TooLarge as error:
            return job_view(item, None, str(error))
        except ManifestError as error:
            return job_view(item, None, clean("; ".join(str(problem) for problem in error.problems)))
        job = by_queue_label(job_view(item, spec, unknown))
        self._specs.keep(job.uid, job.generation, spec, item.get("spec"))
        return replace(job, problem=job.problem or check_renderable(job, self._settings.render))

    def _spec(self, item: RLJobObject, uid: str, generation: int) -> RLJobSpec:
        spec = self._specs.get(uid, generation)
        if spec is None:
            spec, _ = read_spec(item)
            self._specs.keep(uid, generation, spec, item.get("spec"))
        return spec

    def _names_taken(self, job: JobView) -> str:
        if job.spec is None or is_idle(job):
            return ""
        return names_taken(job, self._informers.jobs, self._job, self._settings.render)

    # --- what belongs to it -----------------------------------------------------------------

    def _queue(self, key: JobKey, cluster: ClusterView | None) -> QueueView | None:
        if cluster is None:
            return None
        states = [state for cache in self._informers.queues.values() for state in cache.of_job(key)]
        return next((state.view for state in states if state.cluster_uid == cluster.uid), None)

    async def _secret_exists(self, key: JobKey, job: JobView) -> bool:
        if is_idle(job) or job.deleting:
            return True  # Nothing is asked of it, and asking the API server about it would be a request for nothing.
        secret = secret_name(key.name)
        if job.status.cluster is None:
            return self._tokens.known(key, job.uid, secret, DRIVER_TOKEN_KEY) is not None
        return await self._tokens.read(key, job.uid, secret, DRIVER_TOKEN_KEY) is not None

    async def _sandboxes(self, job: JobView, held: bool) -> SandboxesView:
        """Few jobs have any, and a look at one of them is worth a request.

        The spec of a job that holds no devices may have lost its pool before the first attempt: then too.
        """
        allowed, status = self._settings.render.sandbox_claims, job.status
        if job.deleting or allowed is False:
            return SandboxesView()
        had = bool(allowed) and status.start_time is not None and not status.attempts and not held
        return await read_claims(self._client, job) if had or warm_pool(job.spec) is not None else SandboxesView()

    def _policy_current(self, job: JobView) -> bool:
        if is_idle(job) or job.deleting or job.spec is None or job.problem:
            return True  # Nothing is asked of it, or nothing can be rendered.
        there = self._informers.policy_of(job)
        wanted = policy_to_apply(job, self._settings.render, there is not None)
        return wanted is None or (there is not None and there.digest == policy_digest(wanted))

    # --- the running attempt ----------------------------------------------------------------

    async def _ask(
        self, key: JobKey, job: JobView, state: ClusterState | None
    ) -> tuple[SubmissionView | None, str, DriverView | None, str]:
        attempt = running_attempt(job.status)
        if attempt is None or attempt.submission_id is None or state is None or state.owner_uid != job.uid:
            return None, "", None, ""
        if not self._vouched_for(key, job, attempt):
            submission, driver = await asyncio.gather(
                self._submission(key, state, attempt.submission_id), self._driver(key, job, state)
            )
            if submission[0] is not None:
                self._asked[key] = (attempt.submission_id, time.monotonic())
            return *submission, *driver
        driver = await self._driver(key, job, state)
        if driver[0] is not None:
            return None, "", *driver
        self._asked.pop(key, None)
        return *await self._submission(key, state, attempt.submission_id), *driver

    def _vouched_for(self, key: JobKey, job: JobView, attempt: AttemptStatus) -> bool:
        """Whether an answer of the driver says enough: Ray reported the attempt a moment ago, and nothing is new."""
        name, at = self._asked.get(key, ("", 0.0))
        running = attempt.accepted and attempt.start_step is not None and attempt.stop_time is None
        unchanged = job.status.observed_generation == job.generation
        return running and unchanged and name == attempt.submission_id and time.monotonic() - at < _VOUCHED_SECONDS

    async def _submission(self, key: JobKey, state: ClusterState, name: str) -> tuple[SubmissionView | None, str]:
        try:
            return await (await self.ray_jobs(key, state)).get(name), ""
        except NoAnswer as error:
            self._maybe_stale_token(key, error)
            return None, str(error)

    async def _driver(self, key: JobKey, job: JobView, state: ClusterState) -> tuple[DriverView | None, str]:
        try:
            driver = await self.driver(key, job, state)
            status = await driver.status()
        except NoAnswer as error:
            self._maybe_stale_token(key, error)
            return None, str(error)
        # A driver that says where it is can be reached, whatever its records are: what was read of them so far stays.
        unread = await self._count_records(key, job, driver)
        self._tell_unread(key, unread)
        totals = self._store.driver_totals((*key, job.uid))
        return (
            DriverView(
                ready=status.ready,
                step=status.step,
                attempt=status.attempt,
                phase=status.phase,
                phase_seconds=status.phase_seconds,
                engine_nodes=status.engine_nodes,
                stopping=status.stopping,
                last_checkpoint_step=status.last_checkpoint_step,
                checkpoint_warnings=status.checkpoint_warnings,
                unwritten={what: status.write_messages.get(what, "") for what in status.write_failures},
                last=totals.last,
                median_step_seconds=totals.median_step_seconds,
                useful_seconds=totals.useful_seconds,
                lost_seconds=totals.lost_seconds,
                lost_steps=totals.lost_steps,
                records_error=unread,
            ),
            "",
        )

    async def rebuild(self, key: JobKey) -> str:
        """Count the records of a running job from the beginning; says why it could not be done, or nothing."""
        text, state = self._informers.jobs.get(*key), self._informers.clusters.get(*key)
        if text is None or state is None:
            return ""
        try:
            job = self._job(key, kept_job(text))
            self._store.observe_status(job)
            if running_attempt(job.status) is None or state.owner_uid != job.uid:
                return ""
            driver = await self.driver(key, job, state)
            await driver.status()
        except NoAnswer as error:
            return str(error)
        return await self._count_records(key, job, driver)

    async def _count_records(self, key: JobKey, job: JobView, driver: Driver) -> str:
        """Read and count the records that are new; says why it could not be done, or nothing."""
        seconds = self._settings.rebuild_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._read_records(driver, (*key, job.uid))
            return ""
        except TimeoutError:
            cause, problem = "time", f"reading them took more than {seconds:g} s; what was read is counted"
        except NoAnswer as error:
            self._maybe_stale_token(key, error)
            cause, problem = "answer", str(error)
        except WireError as error:
            cause, problem = "content", str(error)
        self._metrics.record_errors.labels(cause).inc()
        return problem

    def _tell_unread(self, key: JobKey, problem: str) -> None:
        """Log it once: every look at the job meets it again."""
        if problem and self._unread.get(key) != problem:
            logger.warning("%s: its step records cannot be read: %s", key, problem[:2000])
        if problem:
            self._unread[key] = problem
        else:
            self._unread.pop(key, None)

    async def _read_records(self, driver: Driver, key: tuple[str, str, str]) -> None:
        """Read until nothing is left: for a job without many new records in one small page, which waits for nobody.

        Only large pages take one of the few places: a look at a job that is up to date would else wait behind the
        records of others, and behind drivers that answer slowly or never.
        """
        lock = self._reading.setdefault(key, asyncio.Lock())
        async with lock:
            if not self._store.behind(key) and await self._read_small_page(driver, key):
                return
            while await self._read_large_page(driver, key) and self._store.behind(key):
                pass

    async def _read_small_page(self, driver: Driver, key: tuple[str, str, str]) -> bool:
        """Tells whether nothing is left."""
        try:
            await self._read_page(driver, key, _SMALL_PAGE_BYTES)
        except AnswerTooLarge:
            return False
        return not self._store.behind(key)

    async def _read_large_page(self, driver: Driver, key: tuple[str, str, str]) -> int:
        """A place is held for one page, and so for one request's deadline at most: all get their turn."""
        async with self._catching_up:
            return await self._read_page(driver, key, LARGEST_PAGE_BYTES)

    async def _read_page(self, driver: Driver, key: tuple[str, str, str], largest: int) -> int:
        # Between the answer's end and its last use nothing waits: of what JSON makes of it there is one at a time.
        after = self._store.next_index(key)
        page = await driver.steps(after, largest)
        fresh = self._store.feed(key, page.records, page.total)
        if fresh or not page.records or not self._store.behind(key) or self._store.next_index(key) != after:
            return fresh
        # The last counted record, which comes again to be compared, fills a page alone.
        page = await driver.steps(after + 1, largest)
        return self._store.feed(key, page.records, page.total)

    async def ray_jobs(self, key: JobKey, state: ClusterState) -> RayJobs:
        """The job API of the job's head.

        Raises:
            NoAnswer: there is no address or no token to ask it with.
        """
        token = None
        if state.token_secret:
            token = await self._token(key, state.view.uid, state.token_secret, RAY_TOKEN_KEY)
        address = self._address(self._settings.ray_address, key, state.view)
        return RayJobs(self._session, address, token, self._settings.ask_seconds)

    async def driver(self, key: JobKey, job: JobView, state: ClusterState) -> Driver:
        """The endpoint of the job's driver.

        Raises:
            NoAnswer: there is no address or no token to ask it with.
        """
        token = await self._token(key, job.uid, secret_name(key.name), DRIVER_TOKEN_KEY)
        address = self._address(self._settings.driver_address, key, state.view)
        return Driver(self._session, address, token, self._settings.ask_seconds)

    async def _token(self, key: JobKey, owner_uid: str, secret: str, entry: str) -> str:
        try:
            token = await self._tokens.read(key, owner_uid, secret, entry)
        except ApiError as error:
            raise NoAnswer(f"Secret {secret} cannot be read: {error}") from None
        if token is None:
            raise NoAnswer(f"Secret {secret} is not there, is not this job's, or has no key {entry}.")
        return token

    @staticmethod
    def _address(template: str, key: JobKey, cluster: ClusterView) -> str:
        if "{service}" in template and cluster.head_service is None:
            raise NoAnswer(f"RayCluster {key.name} has no head service yet.")
        # A token goes there: what somebody wrote into the status must not be able to lead it to another Service.
        own = head_service_name(key.name)
        if cluster.head_service not in (None, own):
            text = f"RayCluster {key.name} names {cluster.head_service!r} as its head's Service, which is {own}"
            raise NoAnswer(f"{text}; no token goes there.")
        return template.format(service=cluster.head_service, namespace=key.namespace, name=key.name)

    def _maybe_stale_token(self, key: JobKey, error: NoAnswer) -> None:
        if error.code in _REFUSED:
            self._tokens.forget(key)


def is_idle(job: JobView) -> bool:
    """Whether the job has ended or is suspended for good: nothing is done for it until its spec changes."""
    phase = job.status.phase
    suspended = phase is JobPhase.SUSPENDED and job.spec is not None and job.spec.suspend
    return phase in (JobPhase.SUCCEEDED, JobPhase.FAILED) or suspended


def running_attempt(status: RLJobStatus) -> AttemptStatus | None:
    """The attempt that has not ended."""
    last = max(status.attempts, key=lambda attempt: attempt.number, default=None)
    return last if last is not None and last.end_time is None else None
