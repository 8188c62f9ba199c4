"""The two staging slots of one accelerator: memory of its trainer, which the engine on the same device opens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rljob_worker.devices import Device
from rljob_worker.weightsync.errors import WeightSyncError
from rljob_worker.weightsync.slots import SLOT_COUNT, view_of


class DeviceSlots:
    """Both slots, kept and exported once for the life of the process: an export cannot be taken back.

    The memory must never sleep: a sleeping exporter would pull it from under the engine.
    """

    beside = False

    def __init__(self, device: Device, memory: Sequence[torch.Tensor], *, owner: bool = True) -> None:
        """Slots in memory that is there; use `open` for another process's.

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
    def open(cls, device: Device, handles: Sequence[str], slot_bytes: int) -> DeviceSlots:
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
        """What `open` needs, as text."""
        return [self._device.share(tensor).hex() for tensor in self._memory]

    def tensor(self, index: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The view of slot `index` of `shape` and `dtype` that starts at `offset` bytes."""
        return view_of(self._memory[index], offset, dtype, shape)

    def fill(self, source: torch.Tensor, target: torch.Tensor) -> int:
        """Copy on the device; the checksum of `source`, never of where it went."""
        target.copy_(source)
        return self._device.checksum(source)

    def checksum(self, tensor: torch.Tensor) -> int:
        """The device's own checksum."""
        return self._device.checksum(tensor)

    def settle(self) -> None:
        """Wait for the device."""
        self._device.synchronize()

    def close(self) -> None:
        """Drop the tensors; the memory stays as long as somebody has it open."""
        self._memory = []
