"""A device with memory of its own: everything that npu and cuda share, over torch's module of that name."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from types import ModuleType
from typing import ClassVar, Protocol

import torch
from torch.distributed import Store

from rljob_worker.devices.base import Group, MemoryPool
from rljob_worker.devices.checksum import (
    BegunChecksum,
    GrowingSheets,
    Sheets,
    begin_checksum,
    device_checksum,
    end_checksums,
)
from rljob_worker.devices.ipc import export_tensor, import_tensor
from rljob_worker.devices.overlap import StreamModule, TwoStreams
from rljob_worker.devices.visible import parse_visible_devices, physical_device
from rljob_worker.errors import UserError
from rljob_worker.host.memory import MemoryInfo


class DeviceModule(StreamModule, Protocol):
    """Functions of `torch.cuda` and `torch.npu` that are used. Devices are numbered among those that the process
    sees."""

    memory: ModuleType
    """Has the class of a pluggable allocator, under a name of its own for each kind."""

    def device_count(self) -> int: ...  # noqa: D102

    def get_device_properties(self, device: int) -> object: ...  # noqa: D102

    def set_device(self, device: int) -> None: ...  # noqa: D102

    def mem_get_info(self, device: int) -> tuple[int, int]: ...  # noqa: D102

    def memory_reserved(self, device: int) -> int: ...  # noqa: D102

    def synchronize(self, device: int) -> None: ...  # noqa: D102

    def empty_cache(self) -> None: ...  # noqa: D102

    def set_per_process_memory_fraction(self, fraction: float, device: int) -> None: ...  # noqa: D102

    def MemPool(self, allocator: object) -> MemoryPool: ...  # noqa: D102

    def use_mem_pool(self, pool: MemoryPool, device: int) -> AbstractContextManager[None]: ...  # noqa: D102


class AcceleratorDevice(ABC):
    """One of the devices that this process sees.

    Memory is asked about through `torch.npu` or `torch.cuda`, never through `torch.accelerator`, whose memory functions
    raise on torch_npu up to 2.12.
    """

    name: ClassVar[str]
    visible_devices_variable: ClassVar[str]
    process_group_backend: ClassVar[str]
    allocator_variable: ClassVar[str]
    """Variable that configures torch's allocator of the device."""
    hooked_function: ClassVar[str]
    """The runtime's function with which torch allocates device memory: what a preloaded memory saver replaces."""
    own_memory: ClassVar[bool] = True
    names_allowed: ClassVar[bool] = False
    """Whether the variable of visible devices takes names besides numbers."""

    def __init__(self, logical_index: int = 0, *, environment: Mapping[str, str] | None = None) -> None:
        """Device number `logical_index` among those that this process sees.

        Raises:
            UserError: the library is missing, or the process does not see that many devices.
        """
        environment = os.environ if environment is None else environment
        value = environment.get(self.visible_devices_variable)
        visible = parse_visible_devices(self.visible_devices_variable, value, names_allowed=self.names_allowed)
        self._physical = physical_device(self.visible_devices_variable, visible, logical_index)
        self._logical = logical_index
        self.check_installed()
        self._module = self._load()
        count = int(self._module.device_count())
        if logical_index >= count:
            raise UserError(
                f"{self.name} device {logical_index} is wanted, but torch finds {count} "
                f"({self.visible_devices_variable} is {value!r}): give the container its devices, see `rljob doctor`"
            )

    @classmethod
    @abstractmethod
    def check_installed(cls) -> None:
        """UserError, with what to install, when the kind's library is missing."""

    @classmethod
    @abstractmethod
    def _load(cls) -> DeviceModule:
        """torch's module of this kind of device; UserError when its library does not load."""

    @classmethod
    @abstractmethod
    def _rebuild(cls) -> Callable[..., torch.Tensor]:
        """torch's function that opens an exported tensor."""

    @abstractmethod
    def _pluggable_allocator(self, library: str, allocate: str, free: str) -> object:
        """torch's allocator over two functions of a library, as its MemPool takes it."""

    @abstractmethod
    def join_group(self, store: Store, rank: int, size: int, address: str, timeout: timedelta) -> Group:
        """See `Device`. The address is what the library's own variables say: of its network ports."""

    # Which one

    @property
    def index(self) -> int:
        """Physical number; the logical one where the environment names devices without numbers."""
        return int(self._physical) if self._physical.isdecimal() else self._logical

    @property
    def logical_index(self) -> int:
        """Number among the devices that this process sees."""
        return self._logical

    @property
    def torch_device(self) -> torch.device:
        """`<kind>:<logical index>`."""
        return torch.device(self.name, self._logical)

    def identity(self) -> str:
        """`<hostname>:<kind>:<uuid, or physical number>`. A uuid of zeros is one that the driver does not know."""
        if self._physical.startswith("MIG-"):
            # The properties have the uuid of the whole GPU.
            return f"{socket.gethostname()}:{self.name}:{self._physical}"
        uuid = str(getattr(self._module.get_device_properties(self._logical), "uuid", "") or "")
        known = uuid.strip("0-") != ""
        return f"{socket.gethostname()}:{self.name}:{uuid if known else self._physical}"

    def set_current(self) -> None:
        """Make it this thread's device."""
        self._module.set_device(self._logical)

    # Memory

    def memory_info(self) -> MemoryInfo:
        """Memory of the whole device, by all processes."""
        free, total = self._module.mem_get_info(self._logical)
        return MemoryInfo(int(free), int(total))

    def reserved_bytes(self) -> int:
        """Device memory that torch's allocator holds in this process, in use or cached."""
        return int(self._module.memory_reserved(self._logical))

    def synchronize(self) -> None:
        """Wait for all streams."""
        self._module.synchronize(self._logical)

    def overlap(self) -> TwoStreams:
        """See `Device`."""
        return TwoStreams(self._module, self._logical)

    def empty_cache(self) -> None:
        """Free unreachable tensors and give cached blocks back.

        Waits for the device first: the Ascend memory saver ends the process when freeing meets a device that stays
        busy for 3 s.
        """
        gc.collect()
        self.synchronize()
        self._module.empty_cache()

    @abstractmethod
    def empty_host_cache(self) -> None:
        """Give the pinned host memory back that torch keeps for later transfers; the device must be idle."""

    def keep_free(self, nbytes: int) -> None:
        """See `Device`. torch checks its own limit before it asks the runtime, where the Ascend memory saver ends the
        process instead of saying that memory is short."""
        memory = self.memory_info()
        allowed = self.reserved_bytes() + max(0, memory.free - nbytes)
        self._module.set_per_process_memory_fraction(min(1.0, allowed / memory.total), self._logical)

    def new_pool(self, allocator: tuple[str, str, str] | None = None) -> MemoryPool:
        """A pool of torch's allocator whose blocks are never handed to tensors outside of it.

        Args:
            allocator: path of a library and the names of its functions that allocate and free; default: the runtime's.
        """
        pool = self._module.MemPool(self._pluggable_allocator(*allocator) if allocator else None)
        # Never destroyed, not even at exit: versions differ in who releases a pool, and freeing memory that the memory
        # saver has hooked, at a time of Python's choosing, ends the process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
        return pool

    def use_pool(self, pool: MemoryPool) -> AbstractContextManager[None]:
        """Tensors that this thread makes inside take their memory from the pool."""
        return self._module.use_mem_pool(pool, self._logical)

    # Contents

    def checksum(self, tensor: torch.Tensor) -> int:
        """See `devices.checksum`; the device must be awake: it needs memory there."""
        return device_checksum(tensor)

    def begin_checksum(self, tensor: torch.Tensor) -> BegunChecksum:
        """Begin `checksum`, not waiting for the device."""
        return begin_checksum(tensor)

    def sum_of(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Sheets:
        """See `Device`."""
        return Sheets(tensors, dtype)

    def growing_sum(self) -> GrowingSheets:
        """See `Device`."""
        return GrowingSheets()

    def end_checksums(self, begun: Sequence[BegunChecksum | int]) -> list[int]:
        """The values of what `begin_checksum` and sums gave."""
        return end_checksums([each for each in begun if isinstance(each, BegunChecksum)])

    def share(self, tensor: torch.Tensor) -> bytes:
        """See `Device`."""
        return export_tensor(tensor, self._rebuild(), self.identity())

    def open_shared(self, message: bytes) -> torch.Tensor:
        """See `Device`."""
        return import_tensor(message, self._rebuild(), self.identity(), self._logical)
