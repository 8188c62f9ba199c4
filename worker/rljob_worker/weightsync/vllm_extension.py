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
from rljob_worker.tensor_slice import Part
from rljob_worker.upstream.install import install
from rljob_worker.upstream.patch import Process
from rljob_worker.upstream.vllm_types import ModelConfig, ModelRunner
from rljob_worker.weightsync.messages import (
    BeginSync,
    BucketReport,
    Failure,
    FinishReport,
    FinishSync,
    JoinRoute,
    LandBucket,
    WorkerReport,
)
from rljob_worker.weightsync.plan import PlacedTensor, SyncPlan
from rljob_worker.weightsync.route import Receiver, Route
from rljob_worker.weightsync.routes import route_from
from rljob_worker.weightsync.slots import SLOT_COUNT, Checksum
from rljob_worker.weightsync.vllm_layout import ModelLayout, Module, Pairs

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
    rank: int
    """Of this worker in its engine."""
    _rljob_end: tuple[tuple[str, list[str], str], Receiver, SyncPlan] | None = None
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
            WeightSyncError: the slots are not there, the trainers have another plan, or the plan's tensors are not
                those of the engine's model.
        """
        started = time.perf_counter()
        known = (message["route"], message["slots"], message["plan"])
        if self._rljob_end is None or self._rljob_end[0] != known:
            if self._rljob_end is not None:
                self._rljob_end[1].close()
                self._rljob_end = None
            self._rljob_layout = None  # it knows where things lie in the slots
            route, deadline = route_from(message["route"]), time.monotonic() + message["seconds"]
            plan = _plan(message, route)
            receiver = route.make_receiver(self.rljob_device(), message["slots"], message["slot_bytes"], deadline)
            self._rljob_end = (known, receiver, plan)
        _, receiver, plan = self._rljob_end
        if self._rljob_sync is not None:
            self._rljob_sync.give_up()
            self._rljob_sync = None
        model = self.model_runner.model
        if self._rljob_layout is None or not self._rljob_layout.holds(model):
            self._rljob_layout = _layout(model, plan, message["version"])
        self._rljob_sync = _Landing(self._rljob_layout, plan, receiver, message["version"])
        return {"seconds": {"begin": time.perf_counter() - started}}

    @_reporting
    def rljob_join_route(self, message: JoinRoute) -> WorkerReport:
        """Take part in what brings the buckets here, from now on; collective over the workers of all engines.

        Raises:
            WeightSyncError: not all others came in time.
        """
        started = time.perf_counter()
        self._open_sync(message["version"])
        assert self._rljob_end is not None
        _, receiver, plan = self._rljob_end
        deadline = time.monotonic() + message["seconds"]
        receiver.join(plan, message["engine"], self.rank, message["version"], message["anew"], deadline)
        return {"seconds": {"begin": time.perf_counter() - started}}

    @_reporting
    def rljob_land_bucket(self, message: LandBucket) -> BucketReport:
        """Land the tensors of one slot.

        Raises:
            WeightSyncError: a checksum differs, or rows came out of order.
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


def _plan(message: BeginSync, route: Route) -> SyncPlan:
    plan, _ = route.parties().find(time.monotonic() + message["seconds"])
    if plan.fingerprint != message["plan"]:
        raise WeightSyncError(f"the trainers have plan {plan.fingerprint}, expected {message['plan']}")
    return plan


def _layout(model: Model, plan: SyncPlan, version: int) -> ModelLayout:
    try:
        return ModelLayout(model, plan.shapes, plan.torch_dtype)
    except WeightSyncError as error:
        raise WeightSyncError(f"version {version}: {error}") from error


class _Landing:
    """One sync in one worker."""

    def __init__(self, layout: ModelLayout, plan: SyncPlan, receiver: Receiver, version: int) -> None:
        self.version = version
        self._layout, self._plan, self._receiver = layout, plan, receiver
        self._slots = receiver.slots
        self._rows: dict[str, int] = {}
        """Tensors -> rows of them that have landed."""
        self._absent = {module.name: set(module.tensors) for module in layout.modules.values()}
        """Modules -> tensors that they wait for."""
        self._begun: set[str] = set()
        self._staged: dict[str, torch.Tensor] = {}
        """Tensors of which only some rows are here, and that do not go to one place as they are."""

    def give_up(self) -> None:
        """Leave modules that were begun as they can be begun again."""
        self._layout.place_back()

    def land(self, message: LandBucket) -> BucketReport:
        """See `WeightLandingExtension.rljob_land_bucket`."""
        started = time.perf_counter()
        bucket = self._plan.buckets[message["bucket"]]
        where = f"version {self.version}, bucket {bucket.index}"
        self._receiver.receive(bucket)
        if bucket.index + 1 < len(self._plan.buckets):
            self._receiver.expect(self._plan.buckets[bucket.index + 1])
        begun: list[list[Checksum | None]] = []
        repacking = 0.0
        for tensor in bucket.tensors:
            landed = self._rows.get(tensor.name, 0)
            if tensor.first != landed:
                raise WeightSyncError(f"{where}: {tensor.name} from row {tensor.first} came after {landed} rows")
            modules = self._layout.owners[tensor.name]
            for module in modules:
                if module.name not in self._begun:
                    self._begun.add(module.name)
                    module.begin()
            begun.append(self._land(bucket.index, tensor))
            self._rows[tensor.name] = landed + tensor.shape[0]
            if self._rows[tensor.name] == self._plan.shapes[tensor.name][0]:
                packed = time.perf_counter()
                self._complete(tensor.name, modules)
                repacking += time.perf_counter() - packed
        checksums = self._computed(begun)
        for tensor, expected, found in zip(bucket.tensors, message["checksums"], checksums, strict=True):
            tensor.compare(expected, found, where)
        self._slots.synchronize()
        return {
            "names": [tensor.name for tensor in bucket.tensors],
            "checksums": checksums,
            "seconds": {"land": time.perf_counter() - started - repacking, "repack": repacking},
        }

    def _computed(self, begun: Sequence[Sequence[Checksum | None]]) -> list[list[int | None]]:
        found = iter(self._slots.checksums([each for of_tensor in begun for each in of_tensor if each is not None]))
        return [[None if each is None else next(found) for each in of_tensor] for of_tensor in begun]

    def _complete(self, name: str, modules: Sequence[Module]) -> None:
        """All rows of a tensor are here: of some modules it may have been the last."""
        staged = self._staged.pop(name, None)
        if staged is not None:
            self._layout.copy(name, staged)
            self._layout.scratch.give_back([staged])
        for module in modules:
            absent = self._absent[module.name]
            absent.discard(name)
            if not absent:
                module.complete()

    def _land(self, bucket: int, tensor: PlacedTensor) -> list[Checksum | None]:
        """Copy what is in a slot to its places; the checksum of each piece, None where no part is for this worker.

        What goes to one place as it is is summed there, in the same pass; of anything else, the slot's bytes are. Where
        that is, is found once: most of what a small tensor costs is finding it.
        """
        known = self._layout.direct.get((bucket, tensor.offset))
        if known is not None:
            return self._land_pairs(known)
        here = self._slots.tensor(bucket % SLOT_COUNT, tensor.offset, self._plan.torch_dtype, tensor.shape)
        whole = self._plan.shapes[tensor.name]
        if self._layout.taken.get(tensor.name) is not None:
            taken, target = self._layout.place(tensor.name, tensor.first, tensor.shape[0])
        elif tensor.shape != whole and self._layout.copies[tensor.name]:
            if tensor.name not in self._staged:
                like = torch.empty(whole, dtype=here.dtype, device="meta")
                self._staged[tensor.name] = self._layout.scratch.take(like, here.device)
            taken, target = Part(), self._staged[tensor.name].narrow(0, tensor.first, tensor.shape[0])
        else:
            self._layout.copy(tensor.name, here)
            return [self._slots.checksum(piece.part.of(here)) for piece in tensor.pieces]
        pairs = _pairs(taken, target, here, tensor)
        checksums = self._land_pairs(pairs)
        if taken is not None and any(pair is not None and pair[1] is None for pair in pairs):
            target.copy_(taken.of(here))
        elif tensor.name not in self._staged:
            self._layout.remember(bucket, tensor, pairs)
        return checksums

    def _land_pairs(self, pairs: Pairs) -> list[Checksum | None]:
        checksums: list[Checksum | None] = []
        for pair in pairs:
            if pair is None:
                checksums.append(None)
            elif pair[1] is None:
                checksums.append(self._slots.checksum(pair[0]))
            else:
                checksums.append(self._slots.land(pair[0], pair[1]))
        return checksums

    def finish(self, names: Sequence[str], model_config: ModelConfig) -> int:
        """See `WeightLandingExtension.rljob_finish_sync`; returns the number of tensors."""
        landed = [name for name, rows in self._rows.items() if rows == self._plan.shapes[name][0]]
        if landed != list(names):
            wrong = next((name for name in names if name not in landed), "order of tensors")
            raise WeightSyncError(
                f"version {self.version}: {len(landed)} of {len(names)} tensors have landed; wrong: {wrong}"
            )
        self._layout.finish(model_config)
        return len(landed)


def _pairs(taken: Part | None, target: torch.Tensor, here: torch.Tensor, tensor: PlacedTensor) -> Pairs:
    """Where the pieces of what is `here` go in `target`, which has the part `taken` of it alone; None: no part."""
    pairs: Pairs = []
    for piece in tensor.pieces:
        if taken is None or taken.misses(piece.part):
            pairs.append(None)
            continue
        place = taken.place_of(piece.part, target)
        same = place is not None and place.dtype == here.dtype
        pairs.append((piece.part.of(here), place if same else None))
    return pairs
