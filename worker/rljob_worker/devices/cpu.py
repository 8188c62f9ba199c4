"""The CPU as a device: host memory, gloo, xxh3."""

from __future__ import annotations

import ctypes
import gc
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import xxhash
from torch.distributed import ProcessGroupGloo, Store

from rljob_worker.devices import shared_pages
from rljob_worker.devices.base import Group
from rljob_worker.devices.checksum import BegunChecksum
from rljob_worker.devices.overlap import InTurn
from rljob_worker.host.memory import HostMemory, MemoryInfo


class CpuDevice:
    """One share of the host: all of them have the same memory, and indices only tell the workers apart."""

    name = "cpu"
    process_group_backend = "gloo"
    visible_devices_variable = None
    own_memory = False

    def __init__(self, index: int = 0, *, host: HostMemory | None = None) -> None:
        self._index = index
        self._host = host or HostMemory()

    @property
    def index(self) -> int:
        """Number of the share."""
        return self._index

    @property
    def torch_device(self) -> torch.device:
        """`cpu`; torch has only one."""
        return torch.device("cpu")

    def join_group(self, store: Store, rank: int, size: int, address: str, timeout: timedelta) -> Group:
        """See `Device`: gloo, at this address; without one it takes what the host's name says."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        group: Group = ProcessGroupGloo(store, rank, size, options)  # type: ignore[assignment]  # torch's stubs lack it
        return group

    def identity(self) -> str:
        """`<hostname>:cpu:<index>`."""
        return f"{socket.gethostname()}:{self.name}:{self._index}"

    def set_current(self) -> None:
        """Nothing to choose."""

    def memory_info(self) -> MemoryInfo:
        """Host memory under the tightest limit, see `HostMemory.info`."""
        return self._host.info()

    def synchronize(self) -> None:
        """Nothing to wait for: operators on the CPU have finished when they return."""

    def overlap(self) -> InTurn:
        """See `Device`: one after the other."""
        return InTurn()

    def empty_cache(self) -> None:
        """Free unreachable tensors and hand the C heap's free pages back."""
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def empty_host_cache(self) -> None:
        """Nothing: no memory is pinned for a CPU."""

    def keep_free(self, nbytes: int) -> None:
        """Nothing: host memory has the limit of the pod."""

    def share(self, tensor: torch.Tensor) -> bytes:
        """See `Device`: of memory that was made to be shared (`shared_pages`)."""
        return shared_pages.message_of(tensor)

    def open_shared(self, message: bytes) -> torch.Tensor:
        """See `Device`; to read alone."""
        return shared_pages.opened(message)

    def begin_checksum(self, tensor: torch.Tensor) -> int:
        """Compute `checksum`."""
        return self.checksum(tensor)

    def sum_of(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> HostSum:
        """See `Device`."""
        return HostSum(tensors, dtype)

    def growing_sum(self) -> GrowingHostSum:
        """See `Device`."""
        return GrowingHostSum()

    def end_checksums(self, begun: Sequence[BegunChecksum | int]) -> list[int]:
        """They are there."""
        return [each for each in begun if isinstance(each, int)]

    def checksum(self, tensor: torch.Tensor) -> int:
        """xxh3_64 over the contiguous bytes [tensor.numel() * itemsize]; ValueError when it is not on the CPU."""
        if tensor.device.type != "cpu":
            raise ValueError(f"checksum: the tensor is on {tensor.device}, this device is cpu")
        return xxhash.xxh3_64_intdigest(_bytes_of(tensor))


class HostSum:
    """xxh3_64 over the bytes of several tensors, see `Device.sum_of`."""

    def __init__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        self._tensors, self._dtype = list(tensors), dtype

    def begin(self) -> int:
        """The value."""
        growing = GrowingHostSum()
        for tensor in self._tensors:
            growing.add(tensor.to(self._dtype))
        return growing.begin()


class GrowingHostSum:
    """See `Device.growing_sum`."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()

    def add(self, tensor: torch.Tensor) -> None:
        """The next one."""
        self._digest.update(_bytes_of(tensor))

    def begin(self) -> int:
        """The value."""
        return self._digest.intdigest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
