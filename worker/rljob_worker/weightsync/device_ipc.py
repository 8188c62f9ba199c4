"""The two staging slots of one accelerator, by device IPC, and how trainers fill each other's.

The slots are memory of the device's trainer, which the engine on the same device opens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from rljob_worker.devices import Device
from rljob_worker.errors import WeightSyncError
from rljob_worker.weightsync.plan import Bucket, SyncPlan
from rljob_worker.weightsync.shared_memory import HostMemory
from rljob_worker.weightsync.slots import SLOT_COUNT, Batch, Checksum, Digest, Move, Slots, view_of

Digests = dict[int, int]
"""Number of a group of a bucket's pieces -> what the trainer that wrote them says of it."""


class DeviceIpc:
    """Both slots, kept and exported once for the life of the process: an export cannot be taken back.

    The memory must never sleep: a sleeping exporter would pull it from under the engine.
    """

    def __init__(self, device: Device, memory: Sequence[torch.Tensor], *, owner: bool = True) -> None:
        """SharedMemory in memory that is there; use `open` for another process's.

        Args:
            device: where the memory is.
            memory: SLOT_COUNT tensors uint8 [slot_bytes], which never sleep and can be exported.
            owner: this process made the memory.
        """
        self._device = device
        self._memory = list(memory)
        self._owner = owner

    @property
    def owned_bytes(self) -> int:
        """Bytes of both slots where this process made them; 0 where another did."""
        return sum(tensor.nbytes for tensor in self._memory) if self._owner else 0

    @classmethod
    def open(cls, device: Device, handles: Sequence[str], slot_bytes: int) -> DeviceIpc:
        """Map the slots that another process exported.

        Raises:
            WeightSyncError: they are not `slot_bytes` long.
        """
        memory = [device.open_shared(bytes.fromhex(handle)) for handle in handles]
        sizes = [tensor.nbytes for tensor in memory]
        if sizes != [slot_bytes] * SLOT_COUNT:
            raise WeightSyncError(f"{device.identity()}: its staging slots have {sizes} bytes, expected {slot_bytes}")
        return cls(device, memory, owner=False)

    def handles(self) -> list[str]:
        """Handles that `open` takes, as text."""
        return [self._device.share(tensor).hex() for tensor in self._memory]

    def tensor(self, index: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The view of slot `index` of `shape` and `dtype` that starts at `offset` bytes."""
        return view_of(self._memory[index], offset, dtype, shape)

    def filling(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Batch:
        """One list copy on the device, and one checksum of the sources in the number format of the targets."""
        return _DeviceBatch(
            self._device, [Move(source, target, source) for source, target in copies], copies[0][1].dtype
        )

    def landing(self, moves: Sequence[Move]) -> Batch:
        """One list copy on the device, and one checksum of what is summed."""
        return _DeviceBatch(self._device, moves, _number_format(moves))

    def digest(self) -> Digest:
        """By the device's own checksum."""
        return _DeviceDigest(self._device)

    def checksums(self, begun: Sequence[Checksum]) -> list[int]:
        """On the device, which is waited for once."""
        return self._device.end_checksums(begun)

    def synchronize(self) -> None:
        """Wait for the device."""
        self._device.synchronize()

    def close(self) -> None:
        """Drop the tensors; the memory stays as long as somebody has it open."""
        self._memory = []


class _DeviceBatch:
    """See `slots.Batch`."""

    def __init__(self, device: Device, moves: Sequence[Move], dtype: torch.dtype) -> None:
        self._sources = [move.source for move in moves if move.source is not None]
        self._targets = [move.target for move in moves if move.target is not None]
        self._sum = device.sum_of([move.summed for move in moves if move.summed is not None], dtype)

    def run(self) -> Checksum:
        """Two calls, however many pieces there are."""
        if self._sources:
            torch._foreach_copy_(self._targets, self._sources)
        return self._sum.begin()


class _DeviceDigest:
    """See `slots.Digest`."""

    def __init__(self, device: Device) -> None:
        self._sum = device.growing_sum()

    def add(self, move: Move) -> None:
        """Copy, and sum or set aside what is to be summed."""
        if move.target is not None and move.source is not None:
            move.target.copy_(move.source)
        if move.summed is not None:
            self._sum.add(move.summed)

    def begun(self) -> Checksum:
        """The checksum, whose computation the device has begun."""
        return self._sum.begin()


def _number_format(moves: Sequence[Move]) -> torch.dtype:
    return next(move.summed.dtype for move in moves if move.summed is not None)


class Exchange:
    """Trainers that hold whole models between them, which go through a sync bucket by bucket together.

    Those of one host do so where their devices have slots of their own; those of several also with slots in the memory
    of each host. A collective operation that one rank does not come to would hang the others: before each, all say
    whether they can go on. Every wait ends with the group's own time-out.

    Args:
        device: this rank's.
        ranks: global ranks of these trainers, this one among them; their numbers in the plan.
        allocate: makes device memory uint8 [bytes] that never sleeps and that `Device.share` can export.
        group: process group of them, with a backend for CPU tensors beside the device's; None: the world.
        node: those that reach the engines that the plan is for; None: all.
    """

    def __init__(
        self,
        device: Device,
        ranks: Sequence[int],
        allocate: Callable[[int], torch.Tensor],
        group: dist.ProcessGroup | None = None,
        node: Sequence[int] | None = None,
    ) -> None:
        self.device = device
        self._ranks = list(ranks)
        self._allocate = allocate
        self._group = group
        self._alone = len(self._ranks) == 1
        self._node = self._ranks if node is None else list(node)
        self._over_nodes = len(self._node) < len(self._ranks)

    def plans(self, plan: SyncPlan) -> tuple[SyncPlan, SyncPlan]:
        """All ranks' plan as they carry it out, and as this node's engines see it.

        Where some ranks are elsewhere, one stands for them, and pieces of several writers are summed one by one.
        """
        if not self._over_nodes:
            return plan, plan
        return replace(plan, by_piece=True), replace(plan.seen_from(self._node), by_piece=True)

    def make_slots(self, trainer: int, slot_bytes: int) -> Slots | None:
        """This rank's slots, for the engine on the same device to open; None: it writes into those of its host."""
        if self.device.own_memory:
            return DeviceIpc(self.device, [self._allocate(slot_bytes) for _ in range(SLOT_COUNT)])
        return None if trainer in self._node else HostMemory.private(slot_bytes)

    def barrier(self, problem: str = "") -> None:
        """Say that this rank can go on, or why not; returns when all can.

        Raises:
            WeightSyncError: another rank cannot; with what it said.
        """
        if self._alone:
            return
        said: list[str] = [""] * len(self._ranks)
        dist.all_gather_object(said, problem, group=self._group)
        others = [f"trainer-{rank}: {text}" for rank, text in zip(self._ranks, said, strict=True) if text]
        if others and not problem:
            raise WeightSyncError("; ".join(others))

    def broadcast(self, bucket: Bucket, slots: Slots, dtype: torch.dtype) -> None:
        """Bring each piece of a bucket, of all ranks' plan, from its writer's slot into those it is not in."""
        if self._alone:
            return
        rank = dist.get_rank()
        for tensor in bucket.tensors:
            whole = slots.tensor(bucket.index % SLOT_COUNT, tensor.offset, dtype, tensor.shape)
            for piece in tensor.pieces:
                part = piece.part.of(whole)
                takes = self._takes(rank, piece.trainer)
                # The others of a host share its slot: they come to the broadcast, and leave what it brings.
                mine = takes or piece.trainer == rank
                sent = part.contiguous() if mine else torch.empty(part.shape, dtype=dtype, device=part.device)
                dist.broadcast(sent, src=piece.trainer, group=self._group)
                if takes and sent.data_ptr() != part.data_ptr():
                    part.copy_(sent)

    def _takes(self, rank: int, writer: int) -> bool:
        elsewhere = self.device.own_memory or (writer not in self._node and rank == self._node[0])
        return writer != rank and elsewhere

    def digests(self, own: Digests) -> Digests:
        """The words of the writers of a bucket: this rank's own word, and everyone's where some are elsewhere."""
        if not self._over_nodes:
            return own
        everyone: list[Digests] = [{} for _ in self._ranks]
        dist.all_gather_object(everyone, own, group=self._group)
        return {group: digest for said in everyone for group, digest in said.items()}
