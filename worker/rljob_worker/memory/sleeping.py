"""Memory that sleeps: the interface for a trainer, and the choice of one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast, runtime_checkable

import torch

from rljob_api.spec import MemorySaverMode
from rljob_worker.devices.base import AcceleratorMemory, Device
from rljob_worker.devices.shared_pages import SharedPages
from rljob_worker.memory.arena import Arena
from rljob_worker.memory.arena_dispatch import ArenaDispatchMode
from rljob_worker.memory.states import MemorySaverBackend

Region = Callable[[str], AbstractContextManager[object]]
"""`with region(tag)`: tensors created inside belong to the memory saver under that tag (`backup` or `discard`)."""


@runtime_checkable
class SleepingMemory(MemorySaverBackend, Protocol):
    """Memory for tensors that sleep: the CPU's arena, or torch_memory_saver on a device."""

    def region(self, tag: str) -> AbstractContextManager[object]:
        """Tensors that this thread makes on its device inside sleep.

        Under tag `backup` they keep their contents, under `discard` they do not.
        """
        ...

    def staging(self) -> AbstractContextManager[object]:
        """Tensors made inside stay awake, can be shared with other processes, and may be made while the rest sleeps."""
        ...

    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's contents, detached; on the host while asleep, so that a save need not wake the device."""
        ...


def shareable(device: Device, memory: SleepingMemory | None) -> AbstractContextManager[object]:
    """Tensors that this thread makes on the device inside stay awake, and `Device.share` can share them."""
    if not device.own_memory:
        return ArenaDispatchMode(SharedPages(), lambda: "shared")
    return nullcontext() if memory is None else memory.staging()


def sleeping_memory(mode: MemorySaverMode, device: Device) -> SleepingMemory | None:
    """The device's memory saver, verified; None where it is off. To be called before the model is built.

    Raises:
        UserError: it would not work here; names every cause with what to do.
    """
    if mode is MemorySaverMode.OFF:
        return None
    if not device.own_memory:
        return Arena()
    from rljob_worker.memory.saver_checks import verified_torch_saver

    return verified_torch_saver(mode, cast(AcceleratorMemory, device))
