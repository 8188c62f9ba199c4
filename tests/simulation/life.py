"""One seeded life of a job: two replicas of the operator, a cluster, drivers, and the disk that they share."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from replica import Leases, Network, Replica
from simulated_disk import Disk, Killed
from simulated_driver import Driver, newest_whole
from simulation import STEP_SECONDS, UID, RayJob, World, make_spec, with_pool
from virtual_time import Clock, VirtualLoop

from rljob_api import RLJob
from rljob_api.spec import RLJobSpec
from rljob_api.status import JobPhase, RLJobStatus
from rljob_operator.state.observed import PodRole, SubmissionState
from rljob_operator.state.plan import Plan
from rljob_operator.state.timing import LINGER_SECONDS
from rljob_worker.errors import JobError, UserError
from rljob_worker.records.steps import effective_steps, read_steps

TICK = 5.0
LOOKS_AT_DISK = 3
"""One in so many: what is lost stays lost until a driver has started anew."""
TROUBLE_SECONDS = 400.0
CALM_SECONDS = 3000.0
FINAL = (JobPhase.SUCCEEDED, JobPhase.FAILED)


class SharedWorld(World):
    """The world of the reconciler's tests with real drivers in a real run folder, and an API server for two replicas.

    Args:
        spec: the job.
        place: the run folder.
        disk: what it is on.
        clock: virtual seconds.
    """

    def __init__(self, spec: RLJobSpec, place: Path, disk: Disk, clock: Clock) -> None:
        super().__init__(spec)
        self.place = place
        self.disk = disk
        self.clock = clock
        self.replicas: list[Replica] = []
        self.drivers: list[tuple[RayJob, Driver]] = []
        self.commits: list[tuple[int, int]] = []
        """(epoch, step) of each checkpoint that was reported to be there, in their order."""
        self.crashes = self._checks = 0
        self.put_back = False
        self.backup: tuple[RLJobStatus, str | None] | None = None

    # --- drivers --------------------------------------------------------------------------------

    def driver_of(self, job: RayJob) -> Driver | None:
        return next((driver for run, driver in self.drivers if run is job), None)

    def driver_behind_service(self) -> Driver | None:
        """The one that answers at the head's Service."""
        here = self.ray.get(self.head.session, {}).values() if self.head is not None else ()
        found = (self.driver_of(job) for job in here if job.state is SubmissionState.RUNNING and not job.hangs)
        return next((driver for driver in found if driver is not None), None)

    def _drive(self, job: RayJob, seconds: float) -> None:
        if job.state is SubmissionState.PENDING:
            job.state = SubmissionState.RUNNING
        if job.state is not SubmissionState.RUNNING or job.hangs:
            return
        job.age += seconds
        try:
            self._work(job)
        except Killed:
            self._exit(job, SubmissionState.FAILED, -9)
        except UserError as error:
            raise AssertionError(f"the driver says that a restart cannot help: {error}") from error
        except JobError as error:
            self._exit(job, SubmissionState.FAILED, error.exit_code)
        finally:
            self.disk.kill_after = None

    def _work(self, job: RayJob) -> None:
        driver = self.driver_of(job)
        if driver is None:
            if job.stops:
                self._exit(job, SubmissionState.STOPPED, None)
            elif job.age >= self.start_seconds:
                driver = Driver(self.place, self._manifest_of(job), self.clock.monotonic)
                self.drivers.append((job, driver))
                job.ready, job.run_attempt = True, driver.folder.attempt
            return
        try:
            if job.stops:
                driver.leave()
                self._exit(job, SubmissionState.STOPPED, None)
            elif driver.done:
                if driver.all_read or self.clock.now > driver.done_at + LINGER_SECONDS:
                    driver.log.close()
                    self._exit(job, SubmissionState.SUCCEEDED, 0)
            elif job.age % STEP_SECONDS < TICK:
                driver.step()
        finally:
            job.step = float(driver.progress.step)
            self.commits += [(driver.folder.attempt, step) for step in driver.committed]
            driver.committed.clear()

    def _manifest_of(self, job: RayJob) -> RLJob:
        about = {"name": "job", "namespace": "team", "uid": UID}
        document = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": about}
        spec = self.spec.model_copy(
            update={"checkpoint": self.spec.checkpoint.model_copy(update={"path": None}), "suspend": False}
        )
        return RLJob.model_validate({**document, "spec": spec.model_dump(mode="json", by_alias=True)})

    def may_commit(self, job: RayJob) -> bool:
        """Asked of the folder itself, as each driver asks before it commits."""
        driver = self.driver_of(job)
        if job.state is not SubmissionState.RUNNING or driver is None:
            return False
        with self.disk.unwatched(), suppress(JobError):
            return not driver.folder.is_taken_over()
        return False

    def _exit(self, job: RayJob, state: SubmissionState, code: int | None) -> None:
        job.state, job.exit_code = state, code
        driver = self.driver_of(job)
        if driver is not None:
            driver.folder.close()

    # --- the API server -------------------------------------------------------------------------

    def store(self, plan: Plan, version: int) -> bool:
        """Write a plan's status, if the job is still as it was looked at."""
        before = self.status
        stored = self._store(plan, version, lambda: None)
        if stored and self.status.phase is not before.phase and self.status.phase is JobPhase.RUNNING:
            self.backup = (self.status, None if self.cluster is None else self.cluster.uid)
        return stored

    def someone_writes(self, replica: Replica) -> None:
        """A write arrives: nobody else may act by now."""
        others = [one.name for one in self.replicas if one is not replica and one.leader.leads]
        assert not others, f"{replica.name} writes while {others[0]} leads"

    # --- faults ---------------------------------------------------------------------------------

    def power_fails(self) -> None:
        """Everything that runs ends, and the file server forgets what nobody synced."""
        for job in self.running:
            self._exit(job, SubmissionState.FAILED, -9)
        self.lost_nodes_are_found()
        for pod in self.pods:
            if pod.phase == "Running":
                pod.phase = "Failed"
                self._kill_ray(pod)
        self.disk.crash()
        self.crashes += 1
        self._snap()

    def etcd_is_put_back(self) -> None:
        """The RLJob is what it was when it began to run, and its versions go on from there."""
        if self.backup is not None and self.cluster is not None and self.backup[1] == self.cluster.uid:
            self.status = self.backup[0]
            self.version += 1
            self.put_back = True

    # --- what must hold -------------------------------------------------------------------------

    def check(self) -> None:
        """At each instant."""
        assert sum(map(self.may_commit, self.running)) <= 1, "two drivers that can commit"
        # A status that was put back does not know of the attempt that runs: the fence alone ends it then.
        assert len(self.reachable) <= 1 or self.put_back, "two drivers at once where both can be seen"
        leaders = [one.name for one in self.replicas if one.leader.leads]
        assert len(leaders) <= 1, f"{leaders} lead at once"
        epochs = [epoch for epoch, _ in self.commits]
        assert epochs == sorted(epochs), f"a driver that was given up committed: {self.commits}"
        self._checks += 1
        if self._checks % LOOKS_AT_DISK:
            return
        with self.disk.unwatched():
            newest = newest_whole(self.place)
        told = max((step for _, step in self.commits), default=0)
        assert newest >= told, f"the newest checkpoint is of step {newest}, one of step {told} was told to be there"


class Life:
    """Trouble for a while, then quiet until the job has ended.

    Args:
        seed: of everything.
        place: an empty folder.
    """

    def __init__(self, seed: int, place: Path) -> None:
        self.chance = random.Random(seed)
        self.clock = Clock()
        self.disk = Disk(place, self.chance)
        spec = make_spec(
            steps=self.chance.randint(6, 16),
            failurePolicy={"maxRestarts": 20, "backoffSeconds": 5, "maxBackoffSeconds": 10},
            # Of a draw of its own: a seed's other lives stay what they are.
            **with_pool(random.Random(f"sandboxes {seed}").choice([0, 0, 0, 2])),
        )
        self.world = SharedWorld(spec, place / "run", self.disk, self.clock)
        self.leases = Leases()
        self.log: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._counted: list[int] = []
        """Records that a leader had counted, at each instant since the disk last forgot some."""
        self._quiet = False
        """Whether all trouble was over while a driver ran: what it answers at its end arrives."""

    def live(self) -> None:
        """The whole of it.

        Raises:
            AssertionError: an invariant did not hold; its notes tell what happened before.
        """
        loop = VirtualLoop(self.clock)
        module = SimpleNamespace(monotonic=self.clock.monotonic)
        with (
            self.disk.open(),
            patch("rljob_operator.shell.api.leader.time", module),
            patch("rljob_worker.checkpoints.fencing.fcntl.flock", _no_locks),
            patch("time.time", lambda: self.world.now),
        ):
            logging.disable(logging.CRITICAL)
            try:
                loop.run_until_complete(self._lived())
            except AssertionError as error:
                error.add_note("\n".join(self.log[-30:]))
                raise
            finally:
                logging.disable(logging.NOTSET)
                for task in asyncio.all_tasks(loop):
                    task.cancel()
                loop.run_until_complete(asyncio.sleep(0))
                loop.close()

    async def _lived(self) -> None:
        for name in ("a", "b"):
            self._start(name)
        next_fault = 20.0
        while self.clock.now < TROUBLE_SECONDS and self.world.status.phase not in FINAL:
            await self._tick()
            if self.clock.now >= next_fault:
                self._fault()
                next_fault = self.clock.now + self.chance.choice([5.0, 20.0, 40.0, 80.0])
        self._calm()
        self._quiet = self.world.status.phase not in FINAL and not any(driver.done for _, driver in self.world.drivers)
        until = self.clock.now + CALM_SECONDS
        while self.world.status.phase not in FINAL or self.world.cluster is not None or self.world.claims:
            await self._tick()
            assert self.clock.now < until, f"no end: {self.world.status.phase} {self.world.status.message}"
        self._check_end()

    async def _tick(self) -> None:
        await asyncio.sleep(TICK)
        self.world.pass_time(TICK)
        self.world.check()
        self._counted.append(max(one.counted for one in self.world.replicas))
        for name, task in self._tasks.items():
            if task.done() and not task.cancelled():
                raise AssertionError(f"replica {name} ended: {task.exception()}") from task.exception()

    def _start(self, name: str) -> None:
        network = Network(random.Random(self.chance.random()))
        replica = Replica(name, self.world, self.leases, network, random.Random(self.chance.random()))
        self.world.replicas = [one for one in self.world.replicas if one.name != name] + [replica]
        self._tasks[name] = asyncio.get_running_loop().create_task(replica.live())

    # --- faults ---------------------------------------------------------------------------------

    def _fault(self) -> None:
        name, fault = self.chance.choice(self._faults())
        self.log.append(f"{self.clock.now:7.1f} {name}; {self.world.status.phase}, {self.world.commits[-1:]}")
        crashes = self.world.crashes
        fault()
        if self.world.crashes > crashes:
            self._counted.clear()

    def _faults(self) -> list[tuple[str, Callable[[], None]]]:
        world, chance = self.world, self.chance
        replica = chance.choice(world.replicas)

        def awhile() -> float:
            return self.clock.now + chance.choice([8, 25, 70])

        return [
            ("a driver dies between two calls", lambda: setattr(world.disk, "kill_after", chance.randint(0, 60))),
            ("a driver dies between two calls", lambda: setattr(world.disk, "kill_after", chance.randint(0, 60))),
            ("power fails", world.power_fails),
            ("power fails", world.power_fails),
            ("driver fails", lambda: world.driver_exits(1)),
            ("driver hangs", world.driver_hangs),
            ("head's node lost", lambda: world.node_is_lost(PodRole.HEAD)),
            ("lost nodes found", world.lost_nodes_are_found),
            ("head container restarts", world.head_container_restarts),
            ("worker evicted", lambda: world.pod_fails(PodRole.WORKER, "Evicted")),
            *([("sandbox ends", world.sandbox_ends)] if world.claims else []),
            ("suspend", lambda: world.edit(suspend=True)),
            ("resume", lambda: world.edit(suspend=False)),
            ("etcd put back", world.etcd_is_put_back),
            (f"{replica.name} stands still", lambda: setattr(replica.network, "frozen_until", awhile())),
            (f"{replica.name} is cut off", lambda: setattr(replica.network, "cut_until", awhile())),
            (f"{replica.name} loses requests", lambda: setattr(replica.network, "lost", chance.choice([0.1, 0.4]))),
            (f"{replica.name} lags", lambda: setattr(replica, "lag", chance.choice([2, 6]))),
            (f"{replica.name} is killed", lambda: self._restart(replica.name)),
        ]  # fmt: skip

    def _restart(self, name: str) -> None:
        self._tasks[name].cancel()
        self._start(name)

    def _calm(self) -> None:
        self.log.append(f"{self.clock.now:7.1f} calm")
        self.world.edit(suspend=False)
        for replica in self.world.replicas:
            replica.lag, replica.network.lost = 0, 0.0
            replica.network.cut_until = replica.network.frozen_until = 0.0

    # --- the end --------------------------------------------------------------------------------

    def _check_end(self) -> None:
        world = self.world
        assert world.status.phase is JobPhase.SUCCEEDED, f"{world.status.phase}: {world.status.message}"
        with self.disk.unwatched():
            records = read_steps(world.place)
        steps = world.spec.steps
        kept = [record.step for record in effective_steps(records)]
        assert kept == list(range(1, steps + 1)), f"effective_steps: {kept}"
        first = sorted(record.step for record in records if not record.rerun)
        assert first == list(range(1, steps + 1)), f"counted for the first time: {first}"
        counted = max(self._counted, default=0)
        assert counted == len(records) or not self._quiet, f"{counted} of {len(records)} records were counted"
        assert world.status.progress is not None
        assert world.status.progress.step == steps


def _no_locks(*_: object) -> None:
    """A file system without locks: the fence alone keeps drivers apart."""
    raise OSError(37, "No locks available")
