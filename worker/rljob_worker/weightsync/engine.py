"""An engine's side of the weight sync."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rljob_worker.errors import WeightSyncError
from rljob_worker.types import EngineReport
from rljob_worker.weightsync import mailbox
from rljob_worker.weightsync.mailbox import Mailbox, engine_name, trainer_name
from rljob_worker.weightsync.messages import (
    BeginSync,
    Checksums,
    Failure,
    FinishSync,
    JoinRoute,
    LandBucket,
    WorkerReport,
)
from rljob_worker.weightsync.plan import Bucket, SyncPlan
from rljob_worker.weightsync.protocol import (
    ACKNOWLEDGED,
    DONE,
    DOUBTED,
    READY,
    Coverage,
    Doubt,
    EngineState,
    later_version,
)
from rljob_worker.weightsync.route import Route
from rljob_worker.weightsync.vllm_extension import WeightLandingExtension

_NAMING_SECONDS = 10.0
M = TypeVar("M")
A = TypeVar("A")
R = TypeVar("R", bound=WorkerReport)


class Land(Protocol):
    """Runs a method of the worker extension in all workers of an engine."""

    def __call__(self, method: Callable[[WeightLandingExtension, M], A], message: M, seconds: float, /) -> Sequence[A]:
        """Answers of each worker within so many seconds."""
        ...


class WeightSyncEngine:
    """Takes weights from the trainers and lands them in one engine.

    An engine whose workers have `vllm_extension.WeightLandingExtension` mixed in (`worker_extension_cls`) gives its
    `collective_rpc`; the messages are plain lists, dicts, strings and numbers:

        def land(method, message, seconds):
            return llm.collective_rpc(method.__name__, timeout=seconds, args=(message,))

        sync = WeightSyncEngine(land, route=HostRoute(sync_folder), engine=engine_index)
        report = sync.update_weights(version, deadline=60.0)
        llm.reset_prefix_cache()       # cached keys and values are those of the old weights
        assert sync.version == version

    No requests may run meanwhile. While `sync.version` is None the engine's weights are of no version: it must not
    generate until a later sync succeeds.
    """

    def __init__(self, land: Land, *, route: Route, engine: int) -> None:
        """Plan and peers become known with the first sync.

        Args:
            land: runs a method of the worker extension in all workers of the engine.
            route: that of the trainers' `WeightSyncTrainer`s.
            engine: number of this engine among all that it serves, from 0.
        """
        self._land, self._route, self._engine = land, route, engine
        self._version: int | None = None
        self._last_version: int | None = None
        self._host: _Host | None = None

    @property
    def version(self) -> int | None:
        """Version of the engine's weights after the last sync; None before the first and after one that failed."""
        return self._version

    def update_weights(self, version: int, deadline: float) -> EngineReport:
        """Take one version of the weights; returns when this and all other engines have verified it.

        Args:
            version: the version to expect, greater than all before it.
            deadline: seconds from now by which it must be over.

        Returns:
            What was done, `verified` (True) and `mode` (`load`) included; of the seconds, the slowest worker's count.

        Raises:
            ValueError: the version is not greater than the one before.
            WeightSyncError: what went wrong on this or another side, naming the party, the version, bucket and tensor.
        """
        anew, self._version = self._version is None, None
        self._last_version = later_version(version, self._last_version)
        run = _Update(self._land, self._engine, version, time.monotonic() + deadline, anew)
        what = f"receiving version {version}"
        with mailbox.end_for_all(what, lambda: run.doing, lambda reason: self._abort(version, reason)):
            report = run(self._join(time.monotonic() + deadline))
        self._version = version
        return report

    def close(self) -> None:
        """Close the sockets."""
        if self._host is not None:
            self._host.mailbox.close()
            self._host = None

    def _abort(self, version: int, reason: str) -> None:
        if self._host is not None:
            self._host.mailbox.abort(version, reason)

    def _join(self, deadline: float) -> _Host:
        if self._host is None:
            parties = self._route.parties()
            plan, slots = parties.find(deadline)
            if self._engine not in range(plan.engines):
                raise WeightSyncError(f"engine {self._engine} is not among the plan's {plan.engines}")
            peers = [*map(trainer_name, plan.trainers), *map(engine_name, range(plan.engines))]
            box = parties.mailbox(engine_name(self._engine), peers)
            self._host = _Host(plan, self._route, slots, box)
        return self._host


@dataclass(frozen=True, slots=True)
class _Host:
    """An engine's end of a route, and the trainers' plan and slots."""

    plan: SyncPlan
    route: Route
    slots: tuple[str, ...]
    mailbox: Mailbox


class _Update:
    """One sync, from the engine's side."""

    def __init__(self, land: Land, engine: int, version: int, deadline: float, anew: bool) -> None:
        self._land, self._engine, self._version, self._deadline, self._anew = land, engine, version, deadline, anew
        self._seconds = dict.fromkeys(("begin", "wait", "land", "repack", "finish", "rpc"), 0.0)
        self.doing = "before the first bucket"

    def __call__(self, host: _Host) -> EngineReport:
        started = time.perf_counter()
        plan, self._mailbox = host.plan, host.mailbox
        self._state, self._coverage = EngineState(plan, self._version), Coverage(plan, self._version)
        self._trainers = [trainer_name(trainer) for trainer in plan.trainers]
        if not host.route.delivers:
            # It begins while the trainers fill the first bucket.
            self._tell(READY, version=self._version, plan=plan.fingerprint)
            self._begin(host)
        else:
            # The trainers' side of the group waits for its workers, and would not hear of what is wrong with one.
            self._begin(host)
            self._tell(READY, version=self._version, plan=plan.fingerprint)
            self._join()
        while (bucket := self._state.bucket()) is not None:
            self.doing = f"bucket {bucket.index}"
            self._wait(self._state.missing, f"bucket {bucket.index}")
            self._land_bucket(bucket)
            self._tell(ACKNOWLEDGED, bucket=bucket.index)
        self.doing = "after the last bucket"
        self._finish(plan)
        self._tell(DONE, version=self._version)
        self._wait(self._state.not_committed, "commit")
        return {
            "version": self._version,
            "bytes": plan.nbytes,
            "tensors": len(plan.names),
            "buckets": len(plan.buckets),
            "verified": True,
            "mode": "load",
            "seconds": time.perf_counter() - started,
            "begin_seconds": self._seconds["begin"],
            "wait_seconds": self._seconds["wait"],
            "land_seconds": self._seconds["land"],
            "repack_seconds": self._seconds["repack"],
            "finish_seconds": self._seconds["finish"],
            "rpc_seconds": self._seconds["rpc"],
        }

    def _begin(self, host: _Host) -> None:
        message: BeginSync = {
            "version": self._version,
            "plan": host.plan.fingerprint,
            "route": host.route.to_json(),
            "slots": list(host.slots),
            "slot_bytes": host.plan.slot_bytes,
            "seconds": self._seconds_left(),
        }
        self._call(WeightLandingExtension.rljob_begin_sync, message)

    def _join(self) -> None:
        message: JoinRoute = {
            "version": self._version,
            "engine": self._engine,
            "anew": self._anew,
            "seconds": self._seconds_left(),
        }
        self._call(WeightLandingExtension.rljob_join_route, message)

    def _land_bucket(self, bucket: Bucket) -> None:
        digests = self._state.digests()
        message: LandBucket = {"version": self._version, "bucket": bucket.index, "digests": digests}
        reports = self._call(WeightLandingExtension.rljob_land_bucket, message)
        doubts = self._coverage.landed(bucket, digests, reports)
        if doubts:
            raise WeightSyncError(self._named(bucket, doubts[0], reports[doubts[0].worker]["checksums"]))
        self._state.landed()

    def _named(self, bucket: Bucket, doubt: Doubt, checksums: Checksums) -> str:
        """Names the fault, by the sums of the trainer's pieces: it is asked for them, and is not awaited for long."""
        trainer = doubt.group.trainer
        if len(doubt.group.pieces) == 1:
            known = dict(zip(doubt.group.pieces, [doubt.theirs], strict=True))
            theirs = [known.get(placed, 0) for placed in bucket.pieces_of(trainer)]
            return self._coverage.name(bucket, doubt, theirs, checksums)
        self._state.doubt([trainer])
        self._mailbox.send([trainer_name(trainer)], DOUBTED, self._version, bucket=bucket.index)
        self._deadline = min(self._deadline, time.monotonic() + _NAMING_SECONDS)
        names = ", ".join(dict.fromkeys(tensor.name for tensor, _ in doubt.group.pieces))
        self._wait(self._state.silent, f"the sums of bucket {bucket.index}, whose checksum differs in one of {names}")
        return self._coverage.name(bucket, doubt, self._state.sums(trainer), checksums)

    def _finish(self, plan: SyncPlan) -> None:
        self._coverage.finish()
        message: FinishSync = {"version": self._version, "names": list(plan.names)}
        reports = self._call(WeightLandingExtension.rljob_finish_sync, message)
        for worker, report in enumerate(reports):
            if report["version"] != self._version or report["tensors"] != len(plan.names):
                raise WeightSyncError(
                    f"worker {worker} has {report['tensors']} tensors of version {report['version']}, "
                    f"expected {len(plan.names)} of version {self._version}"
                )

    def _seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _call(self, method: Callable[[WeightLandingExtension, M], R | Failure], message: M) -> list[R]:
        started = time.perf_counter()
        answers = self._land(method, message, max(0.001, self._deadline - time.monotonic()))
        spent = time.perf_counter() - started
        reports: list[R] = []
        for worker, answer in enumerate(answers):
            if isinstance(answer, Failure):
                raise WeightSyncError(f"worker {worker}: {answer.reason}")
            reports.append(answer)
        for part in dict.fromkeys(part for report in reports for part in report["seconds"]):
            seconds = max(report["seconds"][part] for report in reports)
            self._seconds[part] += seconds
            spent -= seconds
        self._seconds["rpc"] += spent
        return reports

    def _tell(self, kind: str, **body: object) -> None:
        self._mailbox.send(self._trainers, kind, self._version, **body)

    def _wait(self, missing: Callable[[], list[str]], what: str) -> None:
        started = time.perf_counter()
        while missing():
            self._state.take(
                self._mailbox.receive(self._version, self._deadline, lambda: f"{what}: {', '.join(missing())}")
            )
        self._seconds["wait"] += time.perf_counter() - started
