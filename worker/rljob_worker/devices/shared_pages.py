"""Host memory that other processes open without a copy: each tensor in an anonymous file of its own (memfd).

The file has no name and no limit but the pod's memory: it goes when the last process that has it open does. A process
of the same user opens it by its owner's descriptor, to read.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

_made: dict[int, tuple[int, int]] = {}
"""Address of the memory of each living tensor that was made here -> its descriptor, and its bytes."""


class SharedPages:
    """A `TensorAllocator` of such memory; tags mean nothing here, since none of it sleeps."""

    def allocate_strided(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, tag: str, *, zero: bool = False
    ) -> torch.Tensor:
        """Tensor of that layout, all zeros; OSError where the kernel gives no memory."""
        layout = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")
        nbytes = layout.untyped_storage().nbytes()
        with _disable_current_modes():
            if nbytes == 0:
                return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype)
            storage = _allocate(nbytes).untyped_storage()
            return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), tuple(strides))

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether it was made here."""
        return tensor.untyped_storage().data_ptr() in _made


def _allocate(nbytes: int) -> torch.Tensor:
    descriptor = os.memfd_create("rljob-parameters", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        mapping = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)
    except BaseException:
        os.close(descriptor)
        raise
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    _made[memory.data_ptr()] = (descriptor, nbytes)
    weakref.finalize(mapping, _forget, memory.data_ptr(), descriptor).atexit = False
    return memory


def _forget(address: int, descriptor: int) -> None:
    del _made[address]
    os.close(descriptor)


def message_of(tensor: torch.Tensor) -> bytes:
    """Message for `opened`; ValueError when the tensor is no whole one that was made here."""
    descriptor, nbytes = _made.get(tensor.data_ptr(), (-1, 0))
    if descriptor < 0 or tensor.nbytes != nbytes:
        raise ValueError("share: of the host's memory, only whole tensors that were made to be shared can be")
    inode = os.fstat(descriptor).st_ino
    return json.dumps({"pid": os.getpid(), "descriptor": descriptor, "inode": inode, "bytes": nbytes}).encode()


def opened(message: bytes) -> torch.Tensor:
    """The memory as uint8 [bytes], to read alone: a write ends the process.

    Raises:
        ValueError: its owner has ended, or is not to be seen from this container.
    """
    known: dict[str, int] = json.loads(message)
    path = f"/proc/{known['pid']}/fd/{known['descriptor']}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(
            f"open_shared: process {known['pid']} has ended, or is in another container: {error}"
        ) from error
    try:
        found = os.fstat(descriptor)
        if (found.st_ino, found.st_size) != (known["inode"], known["bytes"]):
            raise ValueError(f"open_shared: {path} is not the memory that process {known['pid']} shared: it has ended")
        mapping = mmap.mmap(descriptor, known["bytes"], mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
    finally:
        os.close(descriptor)
    address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    buffer = (ctypes.c_uint8 * known["bytes"]).from_address(address)
    buffer.mapping = mapping  # type: ignore[attr-defined]  # unmapped with the last tensor over it
    return torch.frombuffer(buffer, dtype=torch.uint8)
