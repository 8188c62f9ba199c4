"""An engine's side of the weight sync."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rljob_worker.weightsync import rendezvous
from rljob_worker.weightsync.errors import WeightSyncError
from rljob_worker.weightsync.mailbox import Mailbox, PeerAborted, consumer_name, producer_name
from rljob_worker.weightsync.plan import Bucket, SyncPlan
from rljob_worker.weightsync.protocol import ACKNOWLEDGED, DONE, READY, Checksums, ConsumerState
from rljob_worker.weightsync.slots import SLOT_COUNT
from rljob_worker.weightsync.sync_ids import SyncIds
from rljob_worker.weightsync.verify import Coverage

Land = Callable[[str, dict[str, Any], float], Sequence[dict[str, Any]]]
"""(method, message, seconds) -> the method's results from all workers of the engine."""


class WeightReceiver:
    """Takes weights from the trainers of the host and lands them in one engine.

    An engine whose workers have `vllm_extension.WeightLandingExtension` mixed in (`worker_extension_cls`) gives its
    `collective_rpc`; the messages are plain lists, dicts, strings and numbers:

        def land(method, message, seconds):
            return llm.collective_rpc(method, timeout=seconds, args=(message,))

        receiver = WeightReceiver(land, folder=sync_folder, consumer=engine_index)
        report = receiver.receive(version, deadline=60.0)
        llm.reset_prefix_cache()       # cached keys and values are those of the old weights
        assert receiver.version == version

    No requests may run meanwhile. While `receiver.version` is None the engine's weights are of no version: it must not
    generate until a later sync succeeds.
    """

    def __init__(self, land: Land, *, folder: str | Path, consumer: int) -> None:
        """Plan and peers become known with the first sync.

        Args:
            land: runs a method of the worker extension in all workers of the engine.
            folder: the one that the trainers' `WeightSender`s got.
            consumer: number of this engine on its host, from 0.
        """
        self._land, self._folder, self._consumer = land, folder, consumer
        self._version: int | None = None
        self._ids = SyncIds()
        self._mailbox: Mailbox | None = None

    @property
    def version(self) -> int | None:
        """Version of the engine's weights after the last sync; None before the first and after one that failed."""
        return self._version

    def receive(self, version: int, deadline: float, *, sync_id: int | None = None) -> dict[str, Any]:
        """Take one version of the weights; returns when this and all other engines have verified it.

        Args:
            version: the version to expect.
            deadline: seconds from now by which it must be over.
            sync_id: as given to the senders; default: `version`.

        Returns:
            `version`, `bytes`, `tensors`, `buckets`, `verified` (True), `mode` (`load`), `seconds` in all, and of those
            `begin_seconds`, `wait_seconds` (for trainers), `checksum_seconds` (what loading does not hide),
            `load_seconds` (vLLM's loaders), `repack_seconds`, `finish_seconds` and `rpc_seconds` (the way to the
            workers); the slowest worker counts.

        Raises:
            WeightSyncError: what went wrong on this or another side, naming who, the version, bucket and tensor.
        """
        self._version = None
        sync_id = self._ids.next(version, sync_id)
        run = _Receive(self, version, sync_id, time.monotonic() + deadline)
        try:
            report = run()
        except PeerAborted as error:
            raise WeightSyncError(f"receiving version {version}: {error}") from error
        except Exception as error:
            reason = f"receiving version {version}, {run.doing}: {error}"
            self._abort(sync_id, reason)
            raise WeightSyncError(reason) from error
        except BaseException as error:
            self._abort(sync_id, f"receiving version {version} was interrupted: {error!r}")
            raise
        self._version = version
        return report

    def close(self) -> None:
        """Close the sockets."""
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None

    def _abort(self, sync_id: int, reason: str) -> None:
        if self._mailbox is not None:
            self._mailbox.abort(sync_id, reason)

    def _join(self, deadline: float) -> Mailbox:
        if self._mailbox is None:
            self._plan, self._slot_names = rendezvous.find(self._folder, deadline)
            if self._consumer not in range(self._plan.consumers):
                raise WeightSyncError(f"engine {self._consumer} is not among the plan's {self._plan.consumers}")
            self._layouts = [[asdict(tensor) for tensor in bucket.tensors] for bucket in self._plan.buckets]
            peers = [*map(producer_name, self._plan.producers), *map(consumer_name, range(self._plan.consumers))]
            self._mailbox = Mailbox(self._folder, consumer_name(self._consumer), peers)
        return self._mailbox


class _Receive:
    """One sync, from the engine's side."""

    def __init__(self, receiver: WeightReceiver, version: int, sync_id: int, deadline: float) -> None:
        self._receiver, self._version, self._sync_id, self._deadline = receiver, version, sync_id, deadline
        self._seconds = dict.fromkeys(("begin", "wait", "checksum", "load", "repack", "finish", "rpc"), 0.0)
        self.doing = "before the first bucket"

    def __call__(self) -> dict[str, Any]:
        started = time.perf_counter()
        self._mailbox = self._receiver._join(self._deadline)
        plan: SyncPlan = self._receiver._plan
        self._state, self._coverage = ConsumerState(plan, self._version), Coverage(plan, self._version)
        self._producers = [producer_name(producer) for producer in plan.producers]
        self._tell(READY, version=self._version, plan=plan.fingerprint)
        self._begin(plan)
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
            **{f"{what}_seconds": seconds for what, seconds in self._seconds.items()},
        }

    def _begin(self, plan: SyncPlan) -> None:
        message = {
            "version": self._version,
            "dtype": plan.dtype,
            "folder": str(self._receiver._folder),
            "slots": list(self._receiver._slot_names),
            "slot_bytes": plan.slot_bytes,
            "seconds": max(0.0, self._deadline - time.monotonic()),
        }
        self._call("rljob_begin_sync", message, "begin")

    def _land_bucket(self, bucket: Bucket) -> None:
        checksums: Checksums = self._state.checksums()
        message = {
            "version": self._version,
            "bucket": bucket.index,
            "slot": bucket.index % SLOT_COUNT,
            "tensors": self._receiver._layouts[bucket.index],
            "checksums": checksums,
        }
        reports = self._call("rljob_land_bucket", message, "checksum", "load", "repack")
        self._coverage.landed(bucket, checksums, reports)
        self._state.landed()

    def _finish(self, plan: SyncPlan) -> None:
        self._coverage.finish()
        reports = self._call("rljob_finish_sync", {"version": self._version, "names": list(plan.names)}, "finish")
        for worker, report in enumerate(reports):
            if report["version"] != self._version or report["tensors"] != len(plan.names):
                raise WeightSyncError(
                    f"worker {worker} has {report['tensors']} tensors of version {report['version']}, "
                    f"expected {len(plan.names)} of version {self._version}"
                )

    def _call(self, method: str, message: dict[str, Any], *parts: str) -> Sequence[dict[str, Any]]:
        started = time.perf_counter()
        reports = list(self._receiver._land(method, message, max(0.001, self._deadline - time.monotonic())))
        spent = time.perf_counter() - started
        for worker, report in enumerate(reports):
            if "error" in report:
                raise WeightSyncError(f"worker {worker}: {report['error']}")
        for part in parts:
            seconds = max(report[f"{part}_seconds"] for report in reports)
            self._seconds[part] += seconds
            spent -= seconds
        self._seconds["rpc"] += spent
        return reports

    def _tell(self, kind: str, **body: Any) -> None:
        self._mailbox.send(self._producers, kind, self._sync_id, **body)

    def _wait(self, missing: Callable[[], list[str]], what: str) -> None:
        started = time.perf_counter()
        while missing():
            self._state.take(
                self._mailbox.receive(self._sync_id, self._deadline, lambda: f"{what}: {', '.join(missing())}")
            )
        self._seconds["wait"] += time.perf_counter() - started
