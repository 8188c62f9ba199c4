"""The weight sync without slots: engines of a host copy from the trainers' own parameters.

A trainer shares the memory of its parameters once, as files of its host or by its device's IPC, and says where in it
each piece is. A bucket is a unit of verification alone: the trainer sums its parameters, and the engine what it landed.
The parameters must stay awake and where they are.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator, Sequence
from typing import TypedDict

import torch

from rljob_worker.devices import Device
from rljob_worker.devices.cpu import CpuDevice
from rljob_worker.errors import WeightSyncError
from rljob_worker.tensor_slice import Part
from rljob_worker.weightsync.device_ipc import DeviceIpc, Exchange
from rljob_worker.weightsync.mailbox import trainer_name
from rljob_worker.weightsync.meeting import HostParties
from rljob_worker.weightsync.plan import Bucket, PlacedTensor, SyncPlan
from rljob_worker.weightsync.senders import MeetingSender
from rljob_worker.weightsync.shared_memory import HostMemory
from rljob_worker.weightsync.slots import Arrived, Batch, Held, Move, Slots


class _Place(TypedDict):
    """A view of shared memory."""

    memory: int
    """Its number."""
    offset: int
    """Bytes from its start."""
    shape: list[int]
    stride: list[int]


class _Shared(TypedDict):
    """A trainer's message: its memory, and where the pieces are that it holds."""

    memory: list[str]
    """Messages of `Device.share`."""
    places: dict[str, _Place]


def _key(name: str, part: Part) -> str:
    return f"{name} {part.dim} {part.start} {part.length}"


class _Unfilled:
    """Mixed into slots of no memory: parameters are read where they are, and to fill is to sum."""

    def tensor(self, index: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor on `meta`: nothing goes there."""
        return torch.empty(shape, dtype=dtype, device="meta")

    def filling(self: Slots, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Batch:
        """Sums of the sources.

        Raises:
            WeightSyncError: one has another number format than engines take.
        """
        for source, target in copies:
            if source.dtype != target.dtype:
                raise WeightSyncError(f"a parameter is {source.dtype}, and engines copy {target.dtype} as it is")
        return self.landing([Move(None, None, source) for source, _ in copies])


class _UnfilledHost(_Unfilled, HostMemory):
    """See `_Unfilled`."""


class _UnfilledDevice(_Unfilled, DeviceIpc):
    """See `_Unfilled`."""


def _no_slots(device: Device) -> Slots:
    """Copies and checksums on a device, without memory."""
    return _UnfilledDevice(device, [], owner=False) if device.own_memory else _UnfilledHost([])


class InPlaceSender(MeetingSender):
    """Sender of a rank whose parameters engines copy themselves."""

    delivers = False
    spreads = False

    def __init__(
        self, parties: HostParties, trainer: int, plan: SyncPlan, exchange: Exchange | None, held: Held
    ) -> None:
        """Share the parameters, and meet the others.

        Raises:
            WeightSyncError: a parameter that this rank sends cannot be shared; names the tensor.
        """
        device = CpuDevice() if exchange is None else exchange.device
        held.look_for_parameters()
        self._held, self._addresses, self._trainer = held, held.addresses, trainer
        owner = device.identity() if device.own_memory else trainer_name(trainer)
        if device.own_memory or trainer in plan.trainers:
            parties.publish_memory(owner, json.dumps(_shared(device, trainer, plan, held)))
        # A name, for engines to see that a trainer began anew.
        super().__init__(parties, trainer, plan, _no_slots(device), (secrets.token_hex(8),))

    def slots(self, deadline: float) -> Slots:
        """See `Sender`.

        Raises:
            WeightSyncError: a parameter is no longer where it was shared.
        """
        if self._held.addresses != self._addresses:
            raise WeightSyncError(
                f"{trainer_name(self._trainer)}: a parameter has moved out of the memory that engines copy from"
            )
        found = super().slots(deadline)
        # Engines of devices whose trainer sends nothing read there too, as soon as the others say that it is time.
        found.synchronize()
        return found

    def deliver(self, *_: object) -> None:
        """Nothing: engines read where the parameters are."""

    def abandon(self) -> None:
        """Nothing is on the way."""


def _shared(device: Device, trainer: int, plan: SyncPlan, held: Held) -> _Shared:
    """Share the memory of the pieces that a trainer holds: those that it sends, on a device all."""
    memory: dict[int, str] = {}
    places: dict[str, _Place] = {}
    placed = [(tensor, piece) for bucket in plan.buckets for tensor in bucket.tensors for piece in tensor.pieces]
    for tensor, piece in placed:
        if piece.trainer != trainer and not device.own_memory:
            continue
        view = held.view(tensor, piece)
        if view is None:
            if piece.trainer == trainer:
                raise WeightSyncError(f"{tensor.name}: it is no view of one parameter, which engines could copy from")
            continue
        storage = view.untyped_storage()
        start = storage.data_ptr()
        if start not in memory:
            whole = torch.empty(0, dtype=torch.uint8, device=view.device).set_(storage, 0, (storage.nbytes(),), (1,))
            try:
                memory[start] = device.share(whole).hex()
            except (RuntimeError, ValueError) as error:
                raise WeightSyncError(f"{tensor.name}: {error}") from error
        places[_key(tensor.name, piece.part)] = {
            "memory": list(memory).index(start),
            "offset": view.data_ptr() - start,
            "shape": list(view.shape),
            "stride": list(view.stride()),
        }
    return {"memory": list(memory.values()), "places": places}


class InPlaceReceiver:
    """Receiver that reads the trainers' parameters: of all trainers of the host, or of the one on its device."""

    def __init__(self, parties: HostParties, device: Device, deadline: float) -> None:
        """Open the memory that trainers share.

        Raises:
            WeightSyncError: it has not come by `deadline`, or a trainer has ended.
        """
        self.slots = _no_slots(device)
        arrived = InParameters()
        self.arrived: Arrived = arrived
        plan, _ = parties.find(deadline)
        owners = [device.identity()] if device.own_memory else [trainer_name(trainer) for trainer in plan.trainers]
        for owner in owners:
            shared: _Shared = json.loads(parties.find_memory(owner, deadline))
            try:
                memory = [device.open_shared(bytes.fromhex(message)) for message in shared["memory"]]
            except (OSError, ValueError) as error:
                raise WeightSyncError(f"the parameters of {owner}: {error}") from error
            arrived.add(memory, shared["places"])

    def join(self, plan: SyncPlan, engine: int, worker: int, version: int, anew: bool, deadline: float) -> None:
        """Nothing to take part in."""

    def expect(self, bucket: Bucket) -> None:
        """Nothing: it is there."""

    def receive(self, bucket: Bucket) -> None:
        """It is there."""

    def close(self) -> None:
        """Close the memory."""
        self.arrived = InParameters()


class InParameters:
    """`Arrived` in memory that trainers share."""

    def __init__(self) -> None:
        self._views: dict[str, tuple[torch.Tensor, _Place]] = {}

    def add(self, memory: Sequence[torch.Tensor], places: dict[str, _Place]) -> None:
        """Take the pieces of a trainer's message, whose memory was opened."""
        for key, place in places.items():
            self._views[key] = (memory[place["memory"]], place)

    def pieces(self, bucket: Bucket, tensor: PlacedTensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """See `Arrived`."""
        return [self._piece(tensor, piece.part, dtype) for piece in tensor.pieces]

    def _piece(self, tensor: PlacedTensor, part: Part, dtype: torch.dtype) -> torch.Tensor:
        found = self._views.get(_key(tensor.name, part))
        if found is None:
            return part.of(torch.empty(tensor.shape, dtype=dtype, device="meta"))
        memory, place = found
        span = sum((size - 1) * stride for size, stride in zip(place["shape"], place["stride"], strict=True)) + 1
        own = memory[place["offset"] : place["offset"] + span * dtype.itemsize].view(dtype)
        return own.as_strided(place["shape"], place["stride"])

    def whole(self, bucket: Bucket, tensor: PlacedTensor, dtype: torch.dtype) -> torch.Tensor:
        """See `Arrived`: the parameter itself where it is the tensor as it is, else put together, contiguous."""
        pieces = self.pieces(bucket, tensor, dtype)
        flat = [piece.flatten(0, piece.dim() - len(tensor.shape)) for piece in pieces]
        return flat[0].contiguous() if len(flat) == 1 else torch.cat(flat, tensor.pieces[0].part.dim or 0)

    def stays(self, tensor: PlacedTensor) -> bool:
        """See `Arrived`."""
        found = self._views.get(_key(tensor.name, tensor.pieces[0].part))
        if len(tensor.pieces) > 1 or found is None:
            return False
        return tuple(found[1]["stride"]) == torch.empty(tensor.shape, device="meta").stride()

    def copies(
        self, bucket: Bucket, tensor: PlacedTensor, dtype: torch.dtype, part: Part, target: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """See `Arrived`."""
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for placed, piece in zip(tensor.pieces, self.pieces(bucket, tensor, dtype), strict=True):
            if part.misses(placed.part):
                continue
            there, here = part.overlap(placed.part)
            found += list(_blocks(piece, here, there.of(target)))
        return found


def _blocks(piece: torch.Tensor, part: Part, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A part of a piece whose rows may be in groups, and its places in `target`, which is that part."""
    groups = piece.dim() - target.dim()
    if part.dim is not None and part.dim > 0:
        piece = piece.narrow(part.dim + groups, part.start, part.length)
        part = Part()
    start = part.start if part.dim == 0 else 0
    done = 0
    for block in _row_blocks(piece, groups, start, len(target)):
        shape = block.shape[: block.dim() - target.dim() + 1]
        yield block, target.narrow(0, done, math.prod(shape)).unflatten(0, shape)
        done += math.prod(shape)


def _row_blocks(piece: torch.Tensor, groups: int, first: int, count: int) -> Iterator[torch.Tensor]:
    """Views that have so many of a piece's rows between them, in order; `groups` of its dimensions are before them."""
    if groups == 0:
        yield piece.narrow(0, first, count)
        return
    of_group = math.prod(piece.shape[1 : 1 + groups])
    while count:
        group, at = divmod(first, of_group)
        if at == 0 and count >= of_group:
            taken = count // of_group * of_group
            yield piece.narrow(0, group, count // of_group)
        else:
            taken = min(of_group - at, count)
            yield from _row_blocks(piece[group], groups - 1, at, taken)
        first, count = first + taken, count - taken
