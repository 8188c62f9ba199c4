"""Kopf as this replica's process: it logs in, lists, watches, calls the handlers, starts and stops the rest."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import kopf
from kopf._cogs.structs.references import Insights  # the type of a parameter of kopf.spawn_tasks()

from rljob_operator.settings import Settings
from rljob_operator.shell.api.access import Access
from rljob_operator.shell.api.metrics import OperatorMetrics
from rljob_operator.shell.caches.informer import Informer, WatchTimes
from rljob_operator.shell.caches.informers import Informers
from rljob_operator.shell.kopf import handlers as _handlers  # noqa: F401  (registers them)
from rljob_operator.shell.kopf.settings import kopf_settings
from rljob_operator.shell.kopf.transport import kopf_session

_LOGIN_PAUSE_SECONDS = 1.0


class KopfProcess:
    """Runs Kopf with the handlers of `handlers.py`.

    Args:
        access: the API server.
        informers: what is watched, and what the events are fed to.
        metrics: where requests are counted.
        settings: namespaces, deadlines, the probe's port.
        times: limits of the watches.
        operator: whose `begin` and `end` are called at start and end.
    """

    def __init__(
        self,
        access: Access,
        informers: Informers,
        metrics: OperatorMetrics,
        settings: Settings,
        times: WatchTimes,
        operator: object,
    ) -> None:
        self._access = access
        self._informers = informers
        self._metrics = metrics
        self._settings = settings
        self._times = times
        self._memo = kopf.Memo(operator=operator, kopf=self, informers=informers)
        self._insights = Insights()
        self._stop = asyncio.Event()
        self._logins = 0

    def stop(self) -> None:
        """Have everything end."""
        self._stop.set()

    async def run(self) -> None:
        """Run until `stop`, SIGTERM, or the end of a part that cannot go on alone.

        Raises:
            Exception: what ended it.
        """
        tasks = await kopf.spawn_tasks(**self._arguments())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            # Kopf's parts end one after the other, the clean-up last; who does not want to wait cannot hurry them.
            ending = asyncio.gather(*tasks, return_exceptions=True)
            while not ending.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(ending)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def _arguments(self) -> dict[str, Any]:
        namespaces, port = self._settings.namespaces, self._settings.probe_port
        host = f"[{self._settings.probe_host}]" if ":" in self._settings.probe_host else self._settings.probe_host
        return {
            "memo": self._memo,
            "settings": kopf_settings(self._informers, self._times, self._settings.request_seconds),
            "insights": self._insights,
            "standalone": True,
            # Kopf would ask the system for the user's name, which a user of a container need not have.
            "identity": self._settings.identity,
            "stop_flag": self._stop,
            "liveness_endpoint": f"http://{host}:{port}/healthz" if port else None,
            **({"namespaces": list(namespaces)} if namespaces else {"clusterwide": True}),
        }

    async def log_in(self) -> kopf.AiohttpSession:
        """A new session for Kopf; after the first one with a pause, so that refusals do not turn in a circle."""
        if self._logins:
            await asyncio.sleep(_LOGIN_PAUSE_SECONDS)
        self._logins += 1
        session = kopf_session(self._access, self._metrics, self._informers.at)
        return kopf.AiohttpSession(server=self._access.configuration.host, aiohttp_session=session)

    async def watch_kinds(self) -> None:
        """Tell Kopf for good which kinds are there, as its own observer of CRDs would.

        That one needs the right to see all CRDs, and ends a watch for good whose CRD is not there at the start.
        """
        await self._insights.ready_resources.wait()
        await self._tell()  # Kopf found kinds of its own, in versions of its own.
        while True:
            await self._informers.discover()
            await self._tell()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.optional_kinds_seconds * random.uniform(0.9, 1.1)):
                    while True:
                        await self._informers.lost.wait()
                        self._informers.drop_lost()
                        await self._tell()

    async def _tell(self) -> None:
        wanted = {_resource(informer) for informer in self._informers}
        if wanted != self._insights.watched_resources:
            async with self._insights.revised:
                self._insights.watched_resources.clear()
                self._insights.watched_resources.update(wanted)
                self._insights.revised.notify_all()


def _resource(informer: Informer) -> kopf.Resource:
    resource, verbs = informer.resource, frozenset({"list", "watch"})
    return kopf.Resource(resource.group, resource.version, resource.plural, namespaced=True, verbs=verbs)
