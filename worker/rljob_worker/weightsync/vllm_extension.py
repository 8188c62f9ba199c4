"""vLLM's side of the weight sync: what a `WeightSyncEngine` calls in every worker of an engine, by `collective_rpc`."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Self, TypeVar

import torch

from rljob_worker.devices import Device, get_device
from rljob_worker.devices.threads import half_the_threads
from rljob_worker.errors import WeightSyncError
from rljob_worker.tensor_slice import Part
from rljob_worker.upstream.install import install
from rljob_worker.upstream.patch import Process
from rljob_worker.upstream.vllm_graphs import GraphMemory, model_of
from rljob_worker.upstream.vllm_types import ModelConfig, ModelRunner
from rljob_worker.weightsync.messages import (
    BeginSync,
    BucketReport,
    Checksums,
    Failure,
    FinishReport,
    FinishSync,
    JoinRoute,
    LandBucket,
    WorkerReport,
)
from rljob_worker.weightsync.places import Owner, Places, Taken
from rljob_worker.weightsync.plan import Bucket, PlacedPiece, PlacedTensor, SyncPlan
from rljob_worker.weightsync.route import Receiver, Route
from rljob_worker.weightsync.routes import route_from
from rljob_worker.weightsync.slots import Batch, Checksum, Digest, Move
from rljob_worker.weightsync.vllm_adapters import AdapterPlaces
from rljob_worker.weightsync.vllm_layout import ModelLayout

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


class Landing:
    """One sync in one worker.

    Modules that compute with their parameters as they are in a checkpoint are written where they are, a bucket in one
    call where it has no others. Any other module is begun, filled and packed as its tensors come.
    """

    def __init__(self, layout: Places, plan: SyncPlan, receiver: Receiver, version: int) -> None:
        self.version = version
        self._layout, self._plan, self._receiver = layout, plan, receiver
        self._slots = receiver.slots
        self._next = 0
        """Bucket to come."""
        self._absent: dict[str, set[str]] = {}
        """Modules that were begun -> tensors that they wait for."""
        self._staged: dict[str, torch.Tensor] = {}
        """Tensors of which only some rows are here, and that do not go to one place as they are."""
        self._repacking = 0.0

    def give_up(self) -> None:
        """Leave modules that were begun as they can be begun again."""
        self._layout.place_back()

    def land(self, message: LandBucket) -> BucketReport:
        """See `WeightLandingExtension.rljob_land_bucket`."""
        started, self._repacking = time.perf_counter(), 0.0
        index = message["bucket"]
        if index != self._next:
            raise WeightSyncError(f"version {self.version}: bucket {index} came after {self._next} buckets")
        self._next += 1
        bucket = self._plan.buckets[index]
        self._receiver.receive(bucket)
        if self._next < len(self._plan.buckets):
            self._receiver.expect(self._plan.buckets[self._next])
        kept = self._kept(bucket)
        begun = self._step_by_step(bucket) if kept is None else [None if each is None else each.run() for each in kept]
        found = iter(self._slots.checksums([each for each in begun if each is not None]))
        digests = [None if each is None else next(found) for each in begun]
        wrong = any(
            ours is not None and ours != theirs for ours, theirs in zip(digests, message["digests"], strict=True)
        )
        checksums = self._checksums(bucket) if wrong else []
        self._slots.synchronize()
        return {
            "names": self._plan.names_in[index],
            "digests": digests,
            "untaken": self._taken(bucket).untaken,
            "checksums": checksums,
            "seconds": {
                "land": time.perf_counter() - started - self._repacking,
                "repack": self._repacking,
            },
        }

    def finish(self, names: Sequence[str], model_config: ModelConfig) -> int:
        """See `WeightLandingExtension.rljob_finish_sync`; returns the number of tensors."""
        if self._next < len(self._plan.buckets) or tuple(names) != self._plan.names:
            coming = {tensor.name for bucket in self._plan.buckets[self._next :] for tensor in bucket.tensors}
            landed = [name for name in self._plan.names if name not in coming]
            wrong = next((name for name in names if name not in landed), "order of tensors")
            raise WeightSyncError(
                f"version {self.version}: {len(landed)} of {len(names)} tensors have landed; wrong: {wrong}"
            )
        self._layout.finish(model_config)
        return len(names)

    # A bucket at once

    def _kept(self, bucket: Bucket) -> list[Batch | None] | None:
        """Batches kept of a bucket, or that can be kept, by group; None: other modules' parameters come and go."""
        kept = self._layout.kept.get(bucket.index)
        if kept is None and all(self._stays(tensor) for tensor in bucket.tensors):
            moves: list[list[Move]] = [[] for _ in self._plan.groups[bucket.index]]
            for number, move in self._grouped(bucket, bucket.tensors):
                moves[number].append(move)
            kept = self._layout.kept[bucket.index] = [self._slots.landing(each) if each else None for each in moves]
        return kept

    def _stays(self, tensor: PlacedTensor) -> bool:
        """Whether a tensor goes where it is computed with, by copies out of the slot alone."""
        modules = self._layout.owners[tensor.name]
        in_place = all(module.lands_in_place() and not module.fills for module in modules)
        one_place = self._layout.taken.get(tensor.name) is not None or self._receiver.arrived.stays(tensor)
        return in_place and one_place and not self._gathers(tensor)

    def _gathers(self, tensor: PlacedTensor) -> bool:
        """Whether all rows of it have to be there before any is copied."""
        name = tensor.name
        rows_alone = tensor.shape != self._plan.shapes[name]
        return rows_alone and self._layout.taken.get(name) is None and bool(self._layout.copies[name])

    # Tensor by tensor

    def _step_by_step(self, bucket: Bucket) -> list[Checksum | None]:
        """Checksums, taken in the pass of the copy for parts that go to one place as they are; else of the slot's
        bytes."""
        digests: dict[int, Digest] = {}
        for tensor in bucket.tensors:
            modules = self._layout.owners[tensor.name]
            for module in modules:
                if module.name not in self._absent:
                    self._absent[module.name] = set(module.tensors)
                    module.begin()
            for number, move in self._grouped(bucket, [tensor]):
                if number not in digests:
                    digests[number] = self._slots.digest()
                digests[number].add(move)
            if tensor.first + tensor.shape[0] == self._plan.shapes[tensor.name][0]:
                packed = time.perf_counter()
                self._complete(tensor.name, modules)
                self._repacking += time.perf_counter() - packed
        numbers = range(len(self._plan.groups[bucket.index]))
        return [digests[number].begun() if number in digests else None for number in numbers]

    def _complete(self, name: str, modules: Sequence[Owner]) -> None:
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

    # Where pieces go

    def _grouped(self, bucket: Bucket, tensors: Sequence[PlacedTensor]) -> Iterator[tuple[int, Move]]:
        """(group, move) of each piece of these tensors, but of groups that this worker has no part of."""
        numbers = iter(self._plan.group_of[bucket.index][self._first_piece(bucket, tensors[0]) :])
        wanted = self._taken(bucket)
        for tensor in tensors:
            for moves in self._moves(bucket, tensor):
                number = next(numbers)
                if not wanted.groups[number]:
                    continue
                for move in moves:
                    if any(each is not None and each.is_meta for each in (move.source, move.summed)):
                        raise WeightSyncError(
                            f"version {self.version}: this worker's part of {tensor.name} is not in the memory of the "
                            "trainer on its device"
                        )
                    yield number, move

    def _first_piece(self, bucket: Bucket, tensor: PlacedTensor) -> int:
        return sum(len(each.pieces) for each in bucket.tensors[: bucket.tensors.index(tensor)])

    def _taken(self, bucket: Bucket) -> Taken:
        """Pieces and groups of a bucket of which this worker has a part; found once."""
        known = self._layout.of_bucket.get(bucket.index)
        if known is None:
            missed = [self._misses(tensor, piece) for tensor in bucket.tensors for piece in tensor.pieces]
            groups = [False] * len(self._plan.groups[bucket.index])
            for number, misses in zip(self._plan.group_of[bucket.index], missed, strict=True):
                groups[number] = groups[number] or not misses
            untaken = [place for place, misses in enumerate(missed) if misses]
            known = self._layout.of_bucket[bucket.index] = Taken(groups, untaken)
        return known

    def _misses(self, tensor: PlacedTensor, piece: PlacedPiece) -> bool:
        if self._layout.taken.get(tensor.name) is None:
            return False
        part = self._layout.part(tensor.name, tensor.first, tensor.shape[0])
        return part is None or part.misses(piece.part)

    def _moves(self, bucket: Bucket, tensor: PlacedTensor) -> list[list[Move]]:
        """Copies and sums for each piece of a tensor."""
        dtype = self._plan.torch_dtype
        pieces = self._receiver.arrived.pieces(bucket, tensor, dtype)
        if self._layout.taken.get(tensor.name) is not None:
            part, target = self._layout.place(tensor.name, tensor.first, tensor.shape[0])
        elif self._gathers(tensor):
            part, target = Part(), self._stage(tensor, pieces[0])
        else:
            here = self._receiver.arrived.whole(bucket, tensor, dtype)
            copies = [Move(source, place, None) for source, place in self._layout.pairs(tensor.name, here)]
            first, *others = [[Move(None, None, piece)] for piece in pieces]
            return [[*copies, *first], *others]
        moves, copied = [], False
        for placed, piece in zip(tensor.pieces, pieces, strict=True):
            taken = part is not None and not part.misses(placed.part)
            place = part.place_of(placed.part, target) if part is not None and taken else None
            if place is not None and place.dtype == dtype:
                if piece.dim() > place.dim():
                    place = place.unflatten(0, piece.shape[: piece.dim() - place.dim() + 1])
                moves.append([Move(piece, place, place)])
                continue
            moves.append([Move(None, None, piece)])
            if taken and not copied and part is not None:
                copied = True
                pairs = self._receiver.arrived.copies(bucket, tensor, dtype, part, target)
                moves[-1] = [*(Move(source, at, None) for source, at in pairs), *moves[-1]]
        return moves

    def _stage(self, tensor: PlacedTensor, here: torch.Tensor) -> torch.Tensor:
        """The rows' place in memory for the whole tensor."""
        if tensor.name not in self._staged:
            like = torch.empty(self._plan.shapes[tensor.name], dtype=here.dtype, device="meta")
            self._staged[tensor.name] = self._layout.scratch.take(like, here.device)
        return self._staged[tensor.name].narrow(0, tensor.first, tensor.shape[0])

    def _checksums(self, bucket: Bucket) -> Checksums:
        """Checksums of each piece, where it landed or, where that is packed by now, in its slot."""
        summed: list[torch.Tensor | None] = []
        for tensor in bucket.tensors:
            if self._stays(tensor):
                summed += [moves[-1].summed for moves in self._moves(bucket, tensor)]
            else:
                summed += self._receiver.arrived.pieces(bucket, tensor, self._plan.torch_dtype)
        return self._slots.checksums([self._slots.landing([Move(None, None, each)]).run() for each in summed])


class WeightLandingExtension:
    """Mixed into vLLM's worker by `worker_extension_cls`; called through `collective_rpc` by a `WeightSyncEngine`.

    Methods do not raise: what their docstrings list under Raises comes back as a `Failure`.
    """

    device: torch.device
    model_runner: ModelRunner
    _rljob_sync: Landing | None = None
    rank: int
    """Rank of this worker in its engine."""
    _rljob_end: tuple[tuple[str, list[str], str], Receiver, SyncPlan] | None = None
    _rljob_layout: Places | None = None
    _rljob_graphs: GraphMemory | None = None
    """None where the engine replays no captured graphs."""

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
            WeightSyncError: the slots are not there, the trainers have another plan, the plan's tensors are not those
                of the engine's model, or captured graphs would not see them.
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
        model = model_of(self.model_runner)
        if self._rljob_layout is None or not self._rljob_layout.holds(model):
            self._rljob_layout = _places(self.model_runner, plan, message["version"])
        if self._rljob_graphs is not None:
            self._rljob_graphs.begin(self._rljob_layout.packed())
        self._rljob_sync = Landing(self._rljob_layout, plan, receiver, message["version"])
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
            WeightSyncError: the bucket is not the next one, or did not come.
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
        if self._rljob_graphs is not None:
            self._rljob_graphs.check()
        self._rljob_sync = None
        return {"version": message["version"], "tensors": tensors, "seconds": {"finish": time.perf_counter() - started}}

    def _open_sync(self, version: int) -> Landing:
        sync = self._rljob_sync
        if sync is None or sync.version != version:
            raise WeightSyncError(f"version {version}: this worker has not begun to take it")
        return sync


def _plan(message: BeginSync, route: Route) -> SyncPlan:
    plan, _ = route.parties().find(time.monotonic() + message["seconds"])
    if plan.fingerprint != message["plan"]:
        raise WeightSyncError(f"the trainers have plan {plan.fingerprint}, expected {message['plan']}")
    return plan


def _places(runner: ModelRunner, plan: SyncPlan, version: int) -> Places:
    adapters, model = getattr(runner, "lora_manager", None), model_of(runner)
    try:
        if adapters is not None:
            return AdapterPlaces(model, adapters._adapter_manager, plan.shapes, plan.torch_dtype)
        return ModelLayout(model, plan.shapes, plan.torch_dtype)
    except WeightSyncError as error:
        raise WeightSyncError(f"version {version}: {error}") from error
