"""The operator at work: caches feed a queue, workers look at the jobs in it and carry out what `reconcile` plans."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry

from rljob_api.status import JobPhase
from rljob_operator.metrics import JobMetricsStore
from rljob_operator.settings import Settings
from rljob_operator.shell.api.access import Access
from rljob_operator.shell.api.client import ApiClient, ApiError
from rljob_operator.shell.api.events import EventRecorder
from rljob_operator.shell.api.leader import LeaderElection, LeadershipLost
from rljob_operator.shell.api.metrics import OperatorMetrics
from rljob_operator.shell.api.resources import JobKey
from rljob_operator.shell.api.tokens import Tokens
from rljob_operator.shell.caches.informer import WatchTimes
from rljob_operator.shell.caches.informers import Informers
from rljob_operator.shell.jobs.carry_out import ActionFailed, Conflict, Executor
from rljob_operator.shell.jobs.health import serve
from rljob_operator.shell.jobs.observe import ObservedJob, Observer, is_idle
from rljob_operator.shell.jobs.queue import Stopped, WorkQueue
from rljob_operator.shell.kopf.process import KopfProcess
from rljob_operator.state.causes import Cause
from rljob_operator.state.observed import Observed
from rljob_operator.state.plan import Event, Plan
from rljob_operator.state.plan_builder import FINAL

logger = logging.getLogger(__name__)
Reconcile = Callable[[Observed, float], Plan]
_REBUILT_AT_ONCE = 64
_EVENT_SECONDS = 2.0
_OLD_CRD = "the CRD in the cluster is older than this operator (upgrade it: crds/rljob.dev_rljobs.yaml): "
_CONFLICT_SECONDS = 5.0


class _Seen(NamedTuple):
    """State of a job when it was looked at last."""

    running: bool
    idle: bool
    """It has ended or is suspended."""
    finished: bool
    """Its end was stored before that look."""


_UNSEEN = _Seen(running=False, idle=False, finished=False)


class Controller:
    """All parts of one replica, put together.

    Args:
        access: the API server.
        settings: all settings.
        reconcile: what should be done about a job.
        times: limits of the watches.
    """

    def __init__(
        self, access: Access, settings: Settings, reconcile: Reconcile, times: WatchTimes | None = None
    ) -> None:
        self.settings = settings
        self.metrics = OperatorMetrics(CollectorRegistry())
        self.store = JobMetricsStore(self.metrics.registry)
        self.queue = WorkQueue(first=self._wants_cluster)
        self.client = ApiClient(access.configuration, self.metrics, settings.request_seconds, places=settings.requests)
        # Its own, so that the Lease never waits behind the jobs.
        self._lease_client = ApiClient(
            access.configuration, self.metrics, settings.renew_seconds / 2, settings.renew_seconds
        )
        self.informers = Informers(
            self.client, self.metrics, self.queue.add, self._pod_changed, settings.namespaces, times
        )
        self._kopf = KopfProcess(access, self.informers, self.metrics, settings, times or WatchTimes(), self)
        self.leader = LeaderElection(self._lease_client, settings)
        self._reconcile = reconcile
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=256, ttl_dns_cache=30),
            # One job's server must not be able to say what is sent to another's.
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        self._tokens = Tokens(self.client)
        self._observer = Observer(
            self.client, self.informers, self._tokens, self.store, self._session, self.metrics, settings
        )
        self._events = EventRecorder(self.client, self.metrics, settings.identity)
        self._executor = Executor(
            self.client,
            self.informers,
            self._tokens,
            self._observer,
            self._events,
            self.metrics,
            settings,
            self.leader.check,
        )
        self._stopping = asyncio.Event()
        self._server: web.AppRunner | None = None
        self._parts: list[asyncio.Task[None] | asyncio.Task[bool]] = []
        self._broken: BaseException | None = None
        self._rebuilding = asyncio.Semaphore(_REBUILT_AT_ONCE)
        self._acting = False
        self._rebuilt = False
        self._port = 0
        self._seen: dict[JobKey, _Seen] = {}
        self._refused: dict[JobKey, Cause] = {}
        self._running = 0
        """Jobs of `_seen` that run."""

    @property
    def port(self) -> int:
        """Port of /healthz, /readyz and /metrics."""
        return self._port

    def stop(self) -> None:
        """Finish what runs, give the Lease back, and return from `run`."""
        self._kopf.stop()

    async def run(self) -> None:
        """Work until `stop` or SIGTERM.

        Raises:
            Exception: what broke a part of the operator that cannot go on alone.
        """
        await self._kopf.run()
        if self._broken is not None:
            raise self._broken

    # --- called by Kopf's handlers ----------------------------------------------------------

    async def begin(self) -> None:
        """Start what runs beside Kopf's watches."""
        self._server = await serve(
            self.settings.http_host,
            self.settings.http_port,
            ready=lambda: self.informers.problem,
            metrics_ready=self._metrics_problem,
            measure=self._measure,
            store=self.store,
        )
        self._port = int(self._server.addresses[0][1])
        parts = {"leading": self._lead(), "events": self._events.run(), "kinds": self._kopf.watch_kinds()}
        for name, part in parts.items():
            task = asyncio.create_task(part, name=name)
            task.add_done_callback(self._part_ended)
            self._parts.append(task)

    def _part_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._broken = self._broken or task.exception()
        self._kopf.stop()

    async def end(self) -> None:
        """Finish what runs, and give the Lease back."""
        self._stopping.set()
        await asyncio.gather(*self._parts[:1], return_exceptions=True)
        await _cancel(self._parts[1:])
        if self._server is not None:
            await self._server.cleanup()
        await self._session.close()
        await self.client.close()
        await self._lease_client.close()

    # --- leading ----------------------------------------------------------------------------

    async def _lead(self) -> None:
        """Take the Lease and work, again and again: a replica that lost it stands by with its caches warm."""
        while await self._before_stop(self.leader.acquire()):
            self._acting = True
            self.metrics.leader.set(1)
            holding = asyncio.create_task(self.leader.hold(), name="hold the Lease")
            working = asyncio.create_task(self._work(), name="work")
            try:
                await _first_to_end([working, holding])
            except LeadershipLost as lost:
                logger.error("nothing is done any more until the Lease is taken again: %s", lost)
            finally:
                await _cancel([working, holding])
                self.metrics.leader.set(0)
            if not self._stopping.is_set():
                # Another replica shows the jobs' metrics from now on.
                self.store.clear()
                self._acting = self._rebuilt = False
        await self.leader.release()

    async def _work(self) -> None:
        """Work on jobs until `stop`, then finish what runs."""
        if not await self._before_stop(self._caches_filled()):
            return
        workers = [asyncio.create_task(self._worker(), name=f"worker {n}") for n in range(self.settings.concurrency)]
        helpers = [
            asyncio.create_task(self._rebuild(), name="rebuild metrics"),
            asyncio.create_task(self._resync(), name="resync"),
        ]
        try:
            await self._before_stop(_first_to_end(workers))
            self.queue.stop()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.settings.stop_seconds):
                    await asyncio.gather(*workers)
            await self._events.drain(_EVENT_SECONDS)
        finally:
            await _cancel([*workers, *helpers])

    async def _before_stop(self, wait: Coroutine[None, None, None]) -> bool:
        """Wait for something, at most until `stop`; tells whether it came first."""
        waiting, stopping = asyncio.create_task(wait), asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([waiting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                waiting.result()
            return not self._stopping.is_set()
        finally:
            await _cancel([waiting, stopping])

    async def _caches_filled(self) -> None:
        for informer in self.informers.needed:
            await informer.synced.wait()
        for key in self.informers.jobs.jobs():
            self.queue.add(key)

    async def _resync(self) -> None:
        """Look at every job now and then: spread evenly, so that it costs the same at any time."""
        while True:
            keys = list(self.informers.jobs.jobs())
            pause = self.settings.resync_seconds / max(1, len(keys))
            for key in keys:
                await asyncio.sleep(pause)
                self.queue.add(key)
            if not keys:
                await asyncio.sleep(pause)

    async def _rebuild(self) -> None:
        """Count the running jobs' records before /metrics answers, so that no counter falls or is counted twice.

        A job whose driver does not answer in time has no counters until it does; the others do not wait for it.
        """
        began = time.monotonic()
        tasks = [
            asyncio.create_task(self._rebuild_one(key), name=f"records {key}") for key in self.informers.jobs.jobs()
        ]
        if tasks:
            await asyncio.wait(tasks, timeout=self.settings.rebuild_total_seconds)
        late = sum(not task.done() for task in tasks)
        await _cancel(tasks)
        self._rebuilt = True
        logger.info("metrics ready after %.1f s; %d of %d jobs late", time.monotonic() - began, late, len(tasks))

    async def _rebuild_one(self, key: JobKey) -> None:
        async with self._rebuilding:
            try:
                problem = await self._observer.rebuild(key)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        if problem:
            logger.warning("%s: metrics begin without its records: %s", key, problem[:2000])

    # --- one job ----------------------------------------------------------------------------

    async def _worker(self) -> None:
        while True:
            try:
                key = await self.queue.get()
            except Stopped:
                return
            try:
                await self._process(key)
            finally:
                self.queue.done(key)

    async def _process(self, key: JobKey) -> None:
        began, result, look = time.monotonic(), "error", None
        try:
            async with asyncio.timeout(self.settings.reconcile_seconds):
                look = await self._observer.observe(key, self._refused.get(key))
                if look is None:
                    self._forget(key)
                else:
                    await self._carry_out(key, look)
            self._refused.pop(key, None)
            self.queue.succeeded(key)
            result = "done"
        except LeadershipLost:
            result = "not leading"
        except Conflict as conflict:
            result = "conflict"
            # Somebody wrote meanwhile, and what they wrote is known by now.
            self.queue.failed(key, at_most=_CONFLICT_SECONDS)
            logger.debug("%s: looked at again: %s", key, conflict)
        except ActionFailed as failed:
            if failed.refused is not None:
                self._refused[key] = failed.refused
            self._failed(key, str(failed), failed.retry_after)
            if failed.told and look is not None:
                self._events.record(look.observed.job, Event("Warning", failed.reason, str(failed)))
        except ApiError as error:
            old = _OLD_CRD if "field not declared in schema" in str(error) else ""
            self._failed(key, f"{old}{error}", error.retry_after)
        except TimeoutError:
            self._failed(key, f"not done within {self.settings.reconcile_seconds:g} s")
        except Exception as error:
            # One job with rubbish must never hurt another: whatever breaks, breaks for this key alone.
            logger.exception("%s: cannot be reconciled", key)
            self._failed(key, f"{type(error).__name__}: {error}")
        self.metrics.reconcile_seconds.labels(result).observe(time.monotonic() - began)

    async def _carry_out(self, key: JobKey, look: ObservedJob) -> None:
        plan = self._reconcile(look.observed, self.client.now())
        retry_after = await self._executor.carry_out(look, plan)
        before, after = look.observed.job, replace(look.observed.job, status=plan.status)
        running, finished = after.status.phase is JobPhase.RUNNING, before.status.phase in FINAL
        self._note_seen(key, _Seen(running, is_idle(after), finished))
        # What is stored, not what is held back: after a restart the metrics must follow from it again.
        self.store.observe_status(before if retry_after is not None else after)
        self.queue.add_after(key, self._next_look(plan, retry_after))

    def _note_seen(self, key: JobKey, seen: _Seen | None) -> None:
        self._running -= self._seen.pop(key, _UNSEEN).running
        if seen is not None:
            self._seen[key] = seen
            self._running += seen.running

    def _pod_changed(self, key: JobKey) -> None:
        """Look at the job, unless it is known to have finished: its cluster goes, whatever becomes of the pods."""
        if not self._seen.get(key, _UNSEEN).finished:
            self.queue.add(key)

    def _wants_cluster(self, key: JobKey) -> bool:
        """Such a job needs little of us, and everything else of it waits for that."""
        return self.informers.clusters.get(*key) is None and not self._seen.get(key, _UNSEEN).idle

    def _next_look(self, plan: Plan, retry_after: float | None) -> float | None:
        """Seconds until the job is looked at anyhow, or (`retry_after`) its held back status is written; None: neither.

        With many running jobs that is later than their plans say, so that all together stay within `looks_per_second`.
        """
        if plan.status.phase is not JobPhase.RUNNING:
            return min([seconds for seconds in (plan.requeue_after, retry_after) if seconds is not None], default=None)
        seconds = plan.requeue_after if retry_after is None else min(retry_after, plan.requeue_after or retry_after)
        return None if seconds is None else max(seconds, self._running / self.settings.looks_per_second)

    def _failed(self, key: JobKey, message: str, retry_after: float | None = None) -> None:
        seconds = self.queue.failed(key, retry_after or 0.0)
        logger.warning("%s: %s; again in %.1f s", key, message[:2000], seconds)

    def _forget(self, key: JobKey) -> None:
        self._note_seen(key, None)
        self._refused.pop(key, None)
        self.queue.forget(key)
        self._executor.forget(key)
        self._observer.forget(key)

    # --- what is told -----------------------------------------------------------------------

    def _metrics_problem(self) -> str:
        return "the running jobs' records are being read" if self._acting and not self._rebuilt else ""

    def _measure(self) -> None:
        self.metrics.queue_depth.set(len(self.queue))
        self.informers.measure()


async def _first_to_end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for the first task; the others are helpers that never end, so that its end is the end of all."""
    ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()


async def _cancel(tasks: Sequence[asyncio.Task[None] | asyncio.Task[bool]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
