"""The interface of a device; code elsewhere never asks which kind it is."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from rljob_worker.memory.host import MemoryInfo


@runtime_checkable
class Device(Protocol):
    """One accelerator, or the CPU in its place."""

    @property
    def name(self) -> str:
        """Kind: `cpu`, `npu` or `cuda`."""
        ...

    @property
    def index(self) -> int:
        """Number of the device on this host, counted over all devices, visible or not."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where tensors are made."""
        ...

    @property
    def process_group_backend(self) -> str:
        """Backend name for `torch.distributed.init_process_group`."""
        ...

    @property
    def visible_devices_variable(self) -> str | None:
        """Environment variable that restricts a process to some devices; None where there is none."""
        ...

    def identity(self) -> str:
        """`<hostname>:<kind>:<index>`: equal in two processes only when they use the same physical device."""
        ...

    def memory_info(self) -> MemoryInfo:
        """Free and total bytes. Reading never empties a cache."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued on the device is done."""
        ...

    def empty_cache(self) -> None:
        """Give cached, unused blocks of the allocator back."""
        ...

    def checksum(self, tensor: torch.Tensor) -> int:
        """64-bit checksum of the elements' bytes in row-major order; dtype and shape are not part of it."""
        ...
