"""vLLM's side of the weight sync: what a `WeightSyncEngine` calls in every worker of an engine, by `collective_rpc`."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Self, TypeVar

import torch

from rljob_worker.devices import Device, get_device
from rljob_worker.devices.threads import half_the_threads
from rljob_worker.errors import WeightSyncError
from rljob_worker.upstream.install import install
from rljob_worker.upstream.patch import Process
from rljob_worker.upstream.vllm_types import ModelConfig, ModelRunner
from rljob_worker.weightsync import mailbox
from rljob_worker.weightsync.device_ipc import DeviceIpc
from rljob_worker.weightsync.messages import (
    BeginSync,
    BucketReport,
    Failure,
    FinishReport,
    FinishSync,
    LandBucket,
    WorkerReport,
)
from rljob_worker.weightsync.plan import PlacedTensor, SyncPlan
from rljob_worker.weightsync.shared_memory import SharedMemory
from rljob_worker.weightsync.transport import SLOT_COUNT, Transport
from rljob_worker.weightsync.vllm_layout import ModelLayout, Module

if TYPE_CHECKING:
    from rljob_worker.upstream.vllm_types import Model

_log = logging.getLogger(__name__)
W = TypeVar("W", bound="WeightLandingExtension")
M = TypeVar("M")
R = TypeVar("R", bound=WorkerReport)


def _reporting(method: Callable[[W, M], R]) -> Callable[[W, M], R | Failure]:
    """Return a `Failure` instead of raising.

    When one of several workers raises, vLLM's multiprocess executor leaves the answers of the others in its queues, and
    the next call gets those.
    """

    @functools.wraps(method)
    def reporting(worker: W, message: M) -> R | Failure:
        try:
            with torch.no_grad(), half_the_threads(), _made_on(worker.device):
                return method(worker, message)
        except Exception as error:
            _log.exception("%s failed", method.__name__)
            kind = "" if isinstance(error, WeightSyncError) else f"{type(error).__name__}: "
            return Failure(f"{kind}{error}")

    return reporting


def _made_on(device: torch.device) -> AbstractContextManager[object]:
    """The reload makes tensors where torch makes them by default; on CPU it does anyway, at less cost a call."""
    return nullcontext() if device.type == "cpu" else device


class WeightLandingExtension:
    """Mixed into vLLM's worker by `worker_extension_cls`; called through `collective_rpc` by a `WeightSyncEngine`.

    Methods do not raise: what their docstrings list under Raises comes back as a `Failure`.
    """

    device: torch.device
    model_runner: ModelRunner
    _rljob_sync: _Landing | None = None
    _rljob_slots: tuple[tuple[str, list[str], str], Transport, SyncPlan] | None = None
    _rljob_layout: ModelLayout | None = None

    def __new__(cls, *_args: object, **_kwargs: object) -> Self:
        """vLLM makes its worker in every worker process, before groups and model: what is changed there is, here."""
        from vllm.platforms import current_platform

        install(Process.ENGINE_WORKER, current_platform.device_type)
        return super().__new__(cls)

    def rljob_device(self) -> Device:
        """The device that this worker computes on."""
        return get_device(self.device.type, self.device.index or 0)

    @_reporting
    def rljob_begin_sync(self, message: BeginSync) -> WorkerReport:
        """Open a sync; an unfinished one is given up.

        Raises:
            WeightSyncError: the slots are not there, the folder has another plan, or the plan's tensors are not those
                of the engine's model.
        """
        started = time.perf_counter()
        place = (message["folder"], message["slots"], message["plan"])
        if self._rljob_slots is None or self._rljob_slots[0] != place:
            if self._rljob_slots is not None:
                self._rljob_slots[1].close()
                self._rljob_slots = None
            plan = _plan(message)
            self._rljob_slots = (place, _attached(self.rljob_device(), message), plan)
            self._rljob_layout = None
        _, slots, plan = self._rljob_slots
        if self._rljob_sync is not None:
            self._rljob_sync.give_up()
            self._rljob_sync = None
        model = self.model_runner.model
        if self._rljob_layout is None or not self._rljob_layout.holds(model):
            self._rljob_layout = _layout(model, plan, message["version"])
        self._rljob_sync = _Landing(self._rljob_layout, plan, slots, message["version"])
        return {"seconds": {"begin": time.perf_counter() - started}}

    @_reporting
    def rljob_land_bucket(self, message: LandBucket) -> BucketReport:
        """Land the tensors of one slot.

        Raises:
            WeightSyncError: a checksum differs, or the bucket has only a part of a module.
        """
        return self._open_sync(message["version"]).land(message)

    @_reporting
    def rljob_finish_sync(self, message: FinishSync) -> FinishReport:
        """Close the sync; the weights count only when this returns.

        Raises:
            WeightSyncError: a tensor of `names` did not land, or a parameter of the model was not loaded.
        """
        started = time.perf_counter()
        landing = self._open_sync(message["version"])
        tensors = landing.finish(message["names"], self.model_runner.model_config)
        self._rljob_sync = None
        return {"version": message["version"], "tensors": tensors, "seconds": {"finish": time.perf_counter() - started}}

    def _open_sync(self, version: int) -> _Landing:
        sync = self._rljob_sync
        if sync is None or sync.version != version:
            raise WeightSyncError(f"version {version}: this worker has not begun to take it")
        return sync


def _plan(message: BeginSync) -> SyncPlan:
    plan, _ = mailbox.find(message["folder"], time.monotonic() + message["seconds"])
    if plan.fingerprint != message["plan"]:
        raise WeightSyncError(f"{message['folder']} has plan {plan.fingerprint}, expected {message['plan']}")
    return plan


def _layout(model: Model, plan: SyncPlan, version: int) -> ModelLayout:
    shapes = {tensor.name: tensor.shape for bucket in plan.buckets for tensor in bucket.tensors}
    try:
        return ModelLayout(model, shapes, plan.torch_dtype)
    except WeightSyncError as error:
        raise WeightSyncError(f"version {version}: {error}") from error


def _attached(device: Device, message: BeginSync) -> Transport:
    if not device.own_memory:
        return SharedMemory.attach(message["slots"], message["slot_bytes"])
    deadline = time.monotonic() + message["seconds"]
    handles = mailbox.find_device(message["folder"], device.identity(), deadline)
    return DeviceIpc.open(device, handles, message["slot_bytes"])


class _Landing:
    """One sync in one worker."""

    def __init__(self, layout: ModelLayout, plan: SyncPlan, slots: Transport, version: int) -> None:
        self.version = version
        self._layout, self._plan, self._slots = layout, plan, slots
        self._names: list[str] = []

    def give_up(self) -> None:
        """Leave modules that were begun as they can be begun again."""
        self._layout.place_back()

    def land(self, message: LandBucket) -> BucketReport:
        """See `WeightLandingExtension.rljob_land_bucket`."""
        started = time.perf_counter()
        bucket = self._plan.buckets[message["bucket"]]
        where = f"version {self.version}, bucket {bucket.index}"
        names = [tensor.name for tensor in bucket.tensors]
        waiting = {module.name: (module, set(module.tensors)) for module in self._modules(names, where)}
        checksums = []
        repacking = 0.0
        for tensor, expected in zip(bucket.tensors, message["checksums"], strict=True):
            places = [waiting[name] for name in {copy.module for copy in self._layout.copies[tensor.name]}]
            for module, absent in places:
                if len(absent) == len(module.tensors):
                    module.begin()
            checksums.append(self._land(bucket.index, tensor))
            tensor.compare(expected, checksums[-1], where)
            packed = time.perf_counter()
            for module, absent in places:
                absent.discard(tensor.name)
                if not absent:
                    module.complete()
            repacking += time.perf_counter() - packed
        self._slots.settle()
        self._names += names
        return {
            "names": names,
            "checksums": checksums,
            "seconds": {"land": time.perf_counter() - started - repacking, "repack": repacking},
        }

    def _modules(self, names: Sequence[str], where: str) -> list[Module]:
        """Those that the bucket's tensors go to; WeightSyncError when it has only a part of one."""
        places = [copy.module for name in names for copy in self._layout.copies[name]]
        modules = [self._layout.modules[name] for name in dict.fromkeys(places)]
        for module in modules:
            if absent := module.tensors.difference(names):
                raise WeightSyncError(f"{where}: {min(absent)} is missing, which belongs to the engine's {module.name}")
        return modules

    def _land(self, bucket: int, tensor: PlacedTensor) -> list[int | None]:
        """Copy a tensor to its places; the checksum of each of its pieces, None where no part of it is for this worker.

        What goes to one place as it is is summed there, in the same pass; of anything else, the slot's bytes are.
        """
        whole = self._slots.tensor(bucket % SLOT_COUNT, tensor.offset, self._plan.torch_dtype, tensor.shape)
        copies = [
            (copy.source.on(whole), copy.target.on(self._layout.modules[copy.module].parameter(copy.parameter)))
            for copy in self._layout.copies[tensor.name]
        ]
        taken = self._layout.taken.get(tensor.name)
        checksums: list[int | None] = []
        landed = True
        for piece in tensor.pieces:
            if taken is not None and taken.misses(piece.part):
                checksums.append(None)
                continue
            target = None if taken is None else taken.place_of(piece.part, copies[0][1])
            if target is None or target.dtype != whole.dtype:
                landed = False
                checksums.append(self._slots.checksum(piece.part.of(whole)))
            else:
                checksums.append(self._slots.land(piece.part.of(whole), target))
        if not landed:
            for source, target in copies:
                target.copy_(source)
        return checksums

    def finish(self, names: Sequence[str], model_config: ModelConfig) -> int:
        """See `WeightLandingExtension.rljob_finish_sync`; returns the number of tensors."""
        if self._names != list(names):
            wrong = next((name for name in names if self._names.count(name) != 1), "order of tensors")
            raise WeightSyncError(
                f"version {self.version}: {len(self._names)} of {len(names)} tensors have landed; wrong: {wrong}"
            )
        self._layout.finish(model_config)
        return len(self._names)
