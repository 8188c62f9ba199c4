"""One replica of the operator: the real election, `reconcile`, records' counting and client of the driver."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from prometheus_client import CollectorRegistry
from simulation import UID, ActionFailed, OperatorDied

from rljob_api.json_types import Json
from rljob_operator.metrics import JobMetricsStore
from rljob_operator.ray.driver import Driver
from rljob_operator.ray.http import AnswerTooLarge, NoAnswer
from rljob_operator.settings import Settings
from rljob_operator.shell.api.client import ApiError
from rljob_operator.shell.api.leader import LeaderElection, LeadershipLost
from rljob_operator.shell.api.metrics import OperatorMetrics
from rljob_operator.shell.api.resources import JobKey
from rljob_operator.shell.jobs.observe import Observer, running_attempt
from rljob_operator.state.observed import DriverView, JobView
from rljob_operator.state.plan import DeleteJob, Plan
from rljob_operator.state.reconcile import reconcile

KEY = JobKey("team", "job")
LONGEST_WAY = 4.0
"""Seconds that a request may be on its way: what lies between a leader's last act and the next one's first is 10."""


class Leases:
    """The API server's one Lease."""

    def __init__(self) -> None:
        self.item: dict[str, Any] | None = None
        self._version = 0

    def read(self) -> dict[str, Any]:
        if self.item is None:
            raise ApiError(404, "NotFound", "no Lease")
        return self.item

    def write(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        known = body["metadata"].get("resourceVersion")
        if (method == "POST") != (self.item is None) or known != (self.item or {}).get("metadata", {}).get(
            "resourceVersion"
        ):
            raise ApiError(409, "Conflict", "another version")
        self._version += 1
        self.item = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self._version)}}
        return self.item


class Network:
    """The way from one replica to all others.

    Args:
        chance: how long something takes, and what is lost.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.frozen_until = 0.0
        """The whole replica stands still so long."""
        self.cut_until = 0.0
        """So long nothing arrives."""
        self.lost = 0.0
        """Share of what is lost otherwise."""

    async def carry(self) -> None:
        """A request or an answer on its way.

        Raises:
            TimeoutError: it is lost, which shows only at a deadline.
        """
        await self.thaw()
        now = asyncio.get_running_loop().time()
        if now < self.cut_until or self._chance.random() < self.lost:
            await asyncio.sleep(10.0)
            await self.thaw()
            raise TimeoutError
        if self._chance.random() < 0.2:
            await asyncio.sleep(self._chance.random() * LONGEST_WAY / 2)
            await self.thaw()

    async def thaw(self) -> None:
        """Go on when the replica does."""
        now = asyncio.get_running_loop().time()
        if now < self.frozen_until:
            await asyncio.sleep(self.frozen_until - now)


class _LeaseClient:
    def __init__(self, leases: Leases, network: Network) -> None:
        self._leases = leases
        self._network = network

    async def get(self, *_: Any) -> Any:
        return await self._asked(self._leases.read)

    async def request(self, method: str, path: str, *, body: Any, total_seconds: float) -> Any:
        return await self._asked(lambda: self._leases.write(method, body))

    async def _asked(self, do: Any) -> Any:
        try:
            await self._network.carry()
            answer = do()
            await self._network.carry()
        except TimeoutError:
            raise ApiError(0, "NoAnswer", "no answer") from None
        return answer


class _Endpoint:
    """Asks the driver that runs behind the head's Service."""

    def __init__(self, world: Any, network: Network) -> None:
        self._world = world
        self._network = network

    async def json(self, method: str, path: str, body: Any = None, largest: int = 2**16) -> Json:
        try:
            await self._network.carry()
        except TimeoutError:
            raise NoAnswer("no answer in time") from None
        driver = self._world.driver_behind_service()
        if driver is None:
            raise NoAnswer("connection refused")
        status, content = driver.ask(method, path)
        if len(content) > largest:
            raise AnswerTooLarge("too large")
        if status >= 300:
            raise NoAnswer(content.decode(), status)
        return cast("Json", json.loads(content))


class Replica:
    """Lives from its process's start to its end.

    Args:
        name: its identity.
        world: the job and its cluster.
        leases: the API server's.
        network: its own.
        chance: how far its caches lag, and how often it looks.
    """

    def __init__(self, name: str, world: Any, leases: Leases, network: Network, chance: random.Random) -> None:
        settings = Settings(identity=name)
        self.name = name
        self.network = network
        self._world = world
        self._chance = chance
        self.leader = LeaderElection(cast("Any", _LeaseClient(leases, network)), settings)
        self.store = JobMetricsStore(CollectorRegistry(), clock=lambda: world.now)
        self.lag = 0
        metrics = OperatorMetrics(CollectorRegistry())
        nothing = cast("Any", None)
        self._observer = Observer(nothing, nothing, nothing, self.store, nothing, metrics, settings)
        client = Driver(nothing, "http://driver", None)
        client._endpoint = cast("Any", _Endpoint(world, network))

        async def driver(*_: Any) -> Driver:
            return client

        self._observer.driver = driver  # type: ignore[method-assign]

    async def live(self) -> None:
        """Stand by, lead, lose the Lease, and again."""
        while True:
            await self.leader.acquire()
            self.store.clear()
            holding = asyncio.create_task(self.leader.hold())
            working = asyncio.create_task(self._work())
            try:
                await asyncio.wait([holding, working], return_when=asyncio.FIRST_COMPLETED)
                # A process that stood still goes on at any of its tasks; here those that write go first.
                await self.network.thaw()
                await asyncio.sleep(1.1 * LONGEST_WAY)
            finally:
                for task in (holding, working):
                    task.cancel()
                ends = await asyncio.gather(holding, working, return_exceptions=True)
            for end in ends:
                if not isinstance(end, LeadershipLost | asyncio.CancelledError):
                    raise AssertionError(f"{self.name} broke: {end}") from end

    async def _work(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._chance.choice([5.0, 5.0, 10.0]))

    async def look(self) -> None:
        """One turn; what does not arrive is left for the next one."""
        world = self._world
        with suppress(TimeoutError, OperatorDied, ActionFailed):
            await self.network.carry()
            version = world.version
            observed = world.observed(self._chance.randint(0, self.lag), driver_answers=False)
            view, error = await self._driver(observed.job)
            plan = reconcile(replace(observed, driver=view, driver_error=error), world.now)
            await self._carry_out(plan, version)

    async def _driver(self, job: JobView) -> tuple[DriverView | None, str]:
        if running_attempt(job.status) is None:
            return None, ""
        return await self._observer._driver(KEY, job, cast("Any", None))

    async def _carry_out(self, plan: Plan, version: int) -> None:
        if plan.status_first and not await self._write(lambda: self._world.store(plan, version)):
            return
        for action in plan.actions:
            await self._write(lambda action=action: self._world._act(action, True))  # type: ignore[misc]
        if not plan.status_first and not any(isinstance(action, DeleteJob) for action in plan.actions):
            await self._write(lambda: self._world.store(plan, version))

    async def _write(self, do: Any) -> Any:
        """A write as `Executor` makes it: the right to act is looked at, then the request is on its way."""
        await self.network.thaw()
        self.leader.check()
        await asyncio.sleep(self._chance.choice([0.0, 0.0, self._chance.random() * LONGEST_WAY]))
        if self._chance.random() < self.network.lost:
            raise TimeoutError
        self._world.someone_writes(self)
        done = do()
        await self.network.carry()
        return done

    @property
    def counted(self) -> int:
        """Step records that it counted."""
        job = self.store._jobs.get(KEY)
        return 0 if job is None or job.uid != UID else job.counts.count
