"""The interface of a device; code elsewhere never asks which kind it is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Protocol, runtime_checkable

import torch
from torch.distributed import BroadcastOptions, Store, Work

from rljob_worker.devices.checksum import BegunChecksum
from rljob_worker.devices.overlap import Overlap
from rljob_worker.host.memory import MemoryInfo


class MemoryPool(Protocol):
    """`torch.cuda.MemPool`, or torch_npu's."""

    @property
    def id(self) -> tuple[int, int]:
        """Id of the device in torch's allocator."""
        ...


class Group(Protocol):
    """Processes that tensors are broadcast among: torch's `ProcessGroupGloo`, NCCL's or HCCL's."""

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions, /) -> Work:
        """Start to bring the root's tensor into those of all; every member calls it."""
        ...


class PreparedSum(Protocol):
    """A checksum of several tensors."""

    def begin(self) -> BegunChecksum | int:
        """Have the device compute it of what they hold now."""
        ...


class GrowingSum(PreparedSum, Protocol):
    """A `PreparedSum` of tensors that were added."""

    def add(self, tensor: torch.Tensor) -> None:
        """The next tensor."""
        ...


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
    def own_memory(self) -> bool:
        """Whether it has memory apart from the host's; if so it is an `AcceleratorMemory`."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Place of new tensors."""
        ...

    @property
    def process_group_backend(self) -> str:
        """Backend name for `torch.distributed.init_process_group`."""
        ...

    @property
    def visible_devices_variable(self) -> str | None:
        """Environment variable that restricts a process to some devices; None where there is none."""
        ...

    def join_group(self, store: Store, rank: int, size: int, address: str, timeout: timedelta) -> Group:
        """A group beside torch's own, whose members may run different programs.

        Collective over its members, which meet in the store.

        Args:
            store: the group's own.
            rank: of this process in the group.
            size: number of members.
            address: of this node, at which the others reach this process.
            timeout: for the others to come, and of what is sent.

        Raises:
            RuntimeError: they did not come.
        """
        ...

    def identity(self) -> str:
        """`<hostname>:<kind>:<uuid or index>`: equal in two processes only when they use the same physical device."""
        ...

    def set_current(self) -> None:
        """Make it the device on which this thread's torch works when none is named."""
        ...

    def memory_info(self) -> MemoryInfo:
        """Free and total bytes. Reading never empties a cache."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued on the device is done."""
        ...

    def overlap(self) -> Overlap:
        """Copies beside what is computed, both after what this thread asked for so far."""
        ...

    def empty_cache(self) -> None:
        """Free unreachable tensors and give cached, unused blocks of the allocator back."""
        ...

    def empty_host_cache(self) -> None:
        """Give the pinned host memory back that torch keeps for later transfers."""
        ...

    def keep_free(self, nbytes: int) -> None:
        """From now on an allocation that would leave less than `nbytes` of the device free first gives this process's
        cached blocks back, and then raises torch.OutOfMemoryError. What others take later is not seen."""
        ...

    def share(self, tensor: torch.Tensor) -> bytes:
        """Message from which another process on this device opens the tensor's memory without a copy.

        The tensor must live until all of them have closed it. Raises RuntimeError when its memory cannot be exported,
        on a CPU ValueError unless it was made to be shared (`shared_pages`).
        """
        ...

    def open_shared(self, message: bytes) -> torch.Tensor:
        """The memory of a tensor that another process shared; ValueError when it is on another device."""
        ...

    def checksum(self, tensor: torch.Tensor) -> int:
        """64-bit checksum of the elements' bytes in row-major order; dtype and shape are not part of it."""
        ...

    def begin_checksum(self, tensor: torch.Tensor) -> BegunChecksum | int:
        """Begin `checksum`, not waiting for the device: of the tensor's content once all asked for before is done."""
        ...

    def sum_of(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> PreparedSum:
        """One checksum of several tensors, one after the other, as rounded to `dtype`; prepared once."""
        ...

    def growing_sum(self) -> GrowingSum:
        """Begin a `sum_of` tensors that come one by one and may change as soon as they were added."""
        ...

    def end_checksums(self, begun: Sequence[BegunChecksum | int]) -> list[int]:
        """The values of what `begin_checksum` and sums gave; the device is waited for once."""
        ...


@runtime_checkable
class AcceleratorMemory(Device, Protocol):
    """Further methods of a device with memory of its own, for the memory saver."""

    @property
    def allocator_variable(self) -> str:
        """Environment variable that configures torch's allocator."""
        ...

    @property
    def hooked_function(self) -> str:
        """The runtime's function with which torch allocates device memory."""
        ...

    def reserved_bytes(self) -> int:
        """Device memory that torch's allocator holds in this process, in use or cached."""
        ...

    def new_pool(self, allocator: tuple[str, str, str] | None = None) -> MemoryPool:
        """A pool of torch's allocator, kept for the life of the process."""
        ...

    def use_pool(self, pool: MemoryPool) -> AbstractContextManager[None]:
        """Tensors that this thread makes inside take their memory from the pool."""
        ...
