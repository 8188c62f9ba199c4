"""What a sync asks of the memory between trainers and engines, wherever it lies."""

from __future__ import annotations

from typing import Protocol

import torch


class Staging(Protocol):
    """Two slots that trainers write and engines read.

    On CPU they are in shared memory, one pair for all processes of the host (`slots.Slots`). On an accelerator each
    device has a pair of its own, which its trainer fills and shares with the engine on it (`device_slots.DeviceSlots`).
    """

    @property
    def beside(self) -> bool:
        """Whether checksums may be computed on another thread while this one copies."""
        ...

    @property
    def owned_bytes(self) -> int:
        """Bytes of both slots where this process made them; 0 where another did."""
        ...

    def tensor(self, index: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The view of slot `index` of `shape` and `dtype` that starts at `offset` bytes."""
        ...

    def fill(self, source: torch.Tensor, target: torch.Tensor) -> int:
        """Copy `source` into `target` (same shape and dtype); the checksum of `source`."""
        ...

    def checksum(self, tensor: torch.Tensor) -> int:
        """64-bit checksum, the same function as that of `fill`; shape and dtype are not part of it."""
        ...

    def settle(self) -> None:
        """Wait until all that was asked of the slots is done: before another process is told so."""
        ...

    def close(self) -> None:
        """Give the slots back; nothing the second time."""
        ...
