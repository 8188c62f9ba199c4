"""Trainers of a host that each have slots of their own bring every bucket's pieces to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from rljob_worker.devices import Device
from rljob_worker.weightsync.device_slots import DeviceSlots
from rljob_worker.weightsync.errors import WeightSyncError
from rljob_worker.weightsync.plan import Bucket
from rljob_worker.weightsync.slots import SLOT_COUNT
from rljob_worker.weightsync.staging import Staging


class Exchange:
    """The trainers of one host, which go through a sync bucket by bucket together.

    A collective operation that one rank does not come to would hang the others: before each, all say whether they can
    go on. Every wait ends with the group's own time-out.

    Args:
        device: this rank's.
        ranks: global ranks of the host's trainers, this one among them; their numbers in the plan.
        allocate: makes device memory uint8 [bytes] that never sleeps and that `Device.share` can export.
        group: process group of them, with a backend for CPU tensors beside the device's; None: the world.
    """

    def __init__(
        self,
        device: Device,
        ranks: Sequence[int],
        allocate: Callable[[int], torch.Tensor],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.device = device
        self._ranks = list(ranks)
        self._allocate = allocate
        self._group = group
        self._alone = len(self._ranks) == 1

    def make_slots(self, slot_bytes: int) -> DeviceSlots:
        """This rank's slots, for the engine on the same device to open."""
        return DeviceSlots(self.device, [self._allocate(slot_bytes) for _ in range(SLOT_COUNT)])

    def agree(self, problem: str = "") -> None:
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

    def spread(self, bucket: Bucket, slots: Staging, dtype: torch.dtype) -> None:
        """Bring each piece of a bucket from the slot of the rank that wrote it into the slots of all."""
        if self._alone:
            return
        for tensor in bucket.tensors:
            whole = slots.tensor(bucket.index % SLOT_COUNT, tensor.offset, dtype, tensor.shape)
            for piece in tensor.pieces:
                part = piece.part_of(whole)
                sent = part.contiguous()
                dist.broadcast(sent, src=piece.producer, group=self._group)
                if sent.data_ptr() != part.data_ptr():
                    part.copy_(sent)
