"""The interface of the two staging slots that trainers write and engines read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from rljob_worker.devices.checksum import BegunChecksum

SLOT_COUNT = 2
Checksum = int | BegunChecksum


class Slots(Protocol):
    """Two slots that trainers write and engines read.

    On CPU they are in shared memory, one pair for all processes of the host (`shared_memory.SharedMemory`). On an
    accelerator each device has a pair of its own, which its trainer fills and shares with the engine on it
    (`device_ipc.DeviceIpc`).
    """

    @property
    def owned_bytes(self) -> int:
        """Bytes of both slots where this process made them; 0 where another did."""
        ...

    def tensor(self, index: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The view of slot `index` of `shape` and `dtype` that starts at `offset` bytes."""
        ...

    def fill(self, source: torch.Tensor, target: torch.Tensor) -> Checksum:
        """Copy `source` into `target` (same shape); the checksum of `source` as sent, never of where it went.

        A `source` of another number format is rounded to that of `target`, before it is summed.
        """
        ...

    def land(self, source: torch.Tensor, target: torch.Tensor) -> Checksum:
        """Copy `source` into `target` (same shape and dtype); the checksum of what is in `target` then."""
        ...

    def checksum(self, tensor: torch.Tensor) -> Checksum:
        """64-bit checksum, the same function as that of `fill`; shape and dtype are not part of it."""
        ...

    def checksums(self, begun: Sequence[Checksum]) -> list[int]:
        """The values of what `fill`, `land` and `checksum` gave."""
        ...

    def synchronize(self) -> None:
        """Wait until all that was asked of the slots is done: before another process is told so."""
        ...

    def close(self) -> None:
        """Give the slots back; nothing the second time."""
        ...


def view_of(slot: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The view of `shape` and `dtype` that starts at `offset` bytes of a slot uint8 [slot_bytes]."""
    nbytes = dtype.itemsize * torch.Size(shape).numel()
    return slot[offset : offset + nbytes].view(dtype).view(shape)
