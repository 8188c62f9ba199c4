"""The two staging slots in host memory: files in /dev/shm, which trainers write and engines read.

Checksums are xxh3, 64 bit, over the elements' bytes in row-major order. Everything here runs on the calling thread
alone: torch would wake all its threads for each copy, and those cores belong to the other side of the sync.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from rljob_worker.errors import WeightSyncError
from rljob_worker.host import staging_slots
from rljob_worker.host.staging_slots import SHARED_MEMORY
from rljob_worker.weightsync.slots import SLOT_COUNT, Checksum, view_of


class HostMemory:
    """Both slots as memory of this process alone."""

    def __init__(self, slots: Sequence[torch.Tensor]) -> None:
        """In tensors uint8 [slot_bytes] on the CPU."""
        self._views = list(slots)
        self._scratch: torch.Tensor | None = None

    @classmethod
    def private(cls, slot_bytes: int) -> HostMemory:
        """Slots that no other process sees."""
        return cls([torch.zeros(slot_bytes, dtype=torch.uint8) for _ in range(SLOT_COUNT)])

    @property
    def owned_bytes(self) -> int:
        """Size of both slots."""
        return sum(view.nbytes for view in self._views)

    def tensor(self, index: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The view of `shape` and `dtype` that starts at `offset` bytes."""
        return view_of(self._views[index], offset, dtype, shape)

    def bytes_of(self, index: int) -> torch.Tensor:
        """A slot as uint8 [slot_bytes]; a view, which must not outlive this object's `close`."""
        return self._views[index]

    def fill(self, source: torch.Tensor, target: torch.Tensor) -> Checksum:
        """Copy `source` into `target`; the checksum of `source`, as rounded to another number format."""
        if source.dtype == target.dtype:
            return copy_with_checksum(source, target)
        if self._scratch is None:
            self._scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8)
        return cast_with_checksum(source, target, self._scratch)

    def land(self, source: torch.Tensor, target: torch.Tensor) -> Checksum:
        """Copy `source` into `target`; the checksum of `target`."""
        return copy_and_checksum(source, target)

    def checksum(self, tensor: torch.Tensor) -> Checksum:
        """xxh3_64 of the bytes."""
        return checksum(tensor)

    def checksums(self, begun: Sequence[Checksum]) -> list[int]:
        """They are there."""
        return [each for each in begun if isinstance(each, int)]

    def synchronize(self) -> None:
        """Nothing to wait for: copies on the CPU are done when they return."""

    def close(self) -> None:
        """Drop the memory; nothing the second time."""
        self._views = []


class SharedMemory(HostMemory):
    """Shared mappings of both slots, kept over syncs: their pages are touched once."""

    def __init__(self, names: Sequence[str], slot_bytes: int, *, owner: bool) -> None:
        """Map existing slots; use `create` or `attach`.

        Raises:
            WeightSyncError: a slot is gone or has another size.
        """
        super().__init__([_map(name, slot_bytes) for name in names])
        self.names = tuple(names)
        self.slot_bytes = slot_bytes
        self._owner = owner

    @classmethod
    def create(cls, run: str, slot_bytes: int) -> SharedMemory:
        """Make both slots, after removing those whose owner is dead; `close` removes them.

        Args:
            run: letters, digits, `_` and `.`: tells runs apart.
            slot_bytes: size of each slot.

        Raises:
            WeightSyncError: /dev/shm has too little room.
            ValueError: an impossible `run` or size.
        """
        names = staging_slots.names(run, SLOT_COUNT)
        if slot_bytes < 1:
            raise ValueError(f"slots of run {run!r} must hold at least a byte, not {slot_bytes}")
        staging_slots.sweep()
        made: list[str] = []
        try:
            for name in names:
                _allocate(name, slot_bytes, made)
            return cls(names, slot_bytes, owner=True)
        except BaseException:
            for name in made:
                (SHARED_MEMORY / name).unlink(missing_ok=True)
            raise

    @classmethod
    def attach(cls, names: Sequence[str], slot_bytes: int) -> SharedMemory:
        """Map slots that another process made."""
        return cls(names, slot_bytes, owner=False)

    @property
    def owned_bytes(self) -> int:
        """Size of both slots where this object made them; 0 where another did."""
        return len(self.names) * self.slot_bytes if self._owner else 0

    def close(self) -> None:
        """Drop the mappings, and remove the files when this is the owner; nothing the second time."""
        super().close()
        if self._owner:
            for name in self.names:
                (SHARED_MEMORY / name).unlink(missing_ok=True)


def _allocate(name: str, nbytes: int, made: list[str]) -> None:
    descriptor = os.open(SHARED_MEMORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    made.append(name)
    try:
        # Without it a full /dev/shm would kill the process with SIGBUS at the first write.
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        free = os.statvfs(SHARED_MEMORY)
        raise WeightSyncError(
            f"{SHARED_MEMORY} has {free.f_bavail * free.f_frsize} bytes free, and a staging slot of the weight sync "
            f"needs {nbytes}, twice; give the container more shared memory, or lower spec.weightSync.bucketBytes"
        ) from error
    finally:
        os.close(descriptor)


def _map(name: str, nbytes: int) -> torch.Tensor:
    try:
        descriptor = os.open(SHARED_MEMORY / name, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise WeightSyncError(f"staging slot {SHARED_MEMORY / name} is gone: its owner has ended") from error
    try:
        size = os.fstat(descriptor).st_size
        if size != nbytes:
            raise WeightSyncError(f"staging slot {SHARED_MEMORY / name} has {size} bytes, expected {nbytes}")
        mapping = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)
    # The tensor keeps the mapping alive; the last view that dies unmaps it.
    return torch.frombuffer(mapping, dtype=torch.uint8)


# Small enough that what was hashed is still in a core's own cache when it is copied.
_CHUNK_BYTES = 1 << 18
_SCRATCH_BYTES = 1 << 19
"""Stays in a core's cache too: values are rounded into it, summed there and copied from it. In whole tensors this takes
3.6 times as long."""
_CAST_AT_ONCE = 1 << 15
"""Elements that torch casts on the calling thread alone."""
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_Array = npt.NDArray[np.generic]


def checksum(tensor: torch.Tensor) -> int:
    """xxh3_64 of a CPU tensor of any strides and dtype; shape and dtype are not part of it."""
    digest = xxhash.xxh3_64()
    for block in _contiguous_blocks(_array(tensor)):
        digest.update(block.data)
    return digest.intdigest()


def copy_with_checksum(source: torch.Tensor, target: torch.Tensor) -> int:
    """Copy `source` into `target` (CPU, same shape and dtype) and return the checksum of `source`.

    Bytes are hashed where they come from, never where they went.
    """
    digest = xxhash.xxh3_64()
    for read, write in _blocks_of_both(source, target):
        digest.update(np.ascontiguousarray(read).data)
        np.copyto(write, read)
    return digest.intdigest()


def cast_with_checksum(source: torch.Tensor, target: torch.Tensor, scratch: torch.Tensor) -> int:
    """Copy `source` into `target` (CPU, same shape) in its dtype and return the checksum of what is sent.

    Bytes are hashed where they were cast to, in `scratch` (uint8), never where they went.
    """
    digest = xxhash.xxh3_64()
    room = scratch.view(target.dtype)
    for read, write in _pairs(source.detach(), target, len(room)):
        cast = room[: read.numel()].view(read.shape)
        for wide, narrow in _pairs(read, cast, _CAST_AT_ONCE):
            narrow.copy_(wide)
        sent = _array(cast)
        digest.update(sent.data)
        np.copyto(_array(write), sent)
    return digest.intdigest()


def _pairs(one: torch.Tensor, other: torch.Tensor, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of two tensors of a shape, at most so many elements each, in row-major order."""
    if one.numel() <= most:
        yield one, other
    elif one.is_contiguous() and other.is_contiguous():
        yield from zip(one.view(-1).split(most), other.view(-1).split(most), strict=True)
    elif rows := most * len(one) // one.numel():
        yield from zip(one.split(rows), other.split(rows), strict=True)
    else:
        for row, beside in zip(one, other, strict=True):
            yield from _pairs(row, beside, most)


def copy_and_checksum(source: torch.Tensor, target: torch.Tensor) -> int:
    """Copy `source` into `target` (CPU, same shape and dtype) and return the checksum of `target`.

    Bytes are hashed where they went, while they are in the cache.
    """
    digest = xxhash.xxh3_64()
    for read, write in _blocks_of_both(source, target):
        np.copyto(write, read)
        digest.update(np.ascontiguousarray(write).data)
    return digest.intdigest()


def _blocks_of_both(source: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[_Array, _Array]]:
    read, write = _array(source), _array(target)
    if read.flags.c_contiguous and write.flags.c_contiguous:
        read, write = read.reshape(-1), write.reshape(-1)
    elif read.ndim == 0 or read.nbytes <= _CHUNK_BYTES:
        yield read, write
        return
    rows = max(1, _CHUNK_BYTES * len(read) // max(1, read.nbytes))
    for start in range(0, len(read), rows):
        yield read[start : start + rows], write[start : start + rows]


def _array(tensor: torch.Tensor) -> _Array:
    """The tensor's memory as integers; numpy has no bfloat16."""
    array: _Array = tensor.detach().view(_SAME_SIZE[tensor.itemsize]).numpy()
    return array


def _contiguous_blocks(array: _Array) -> Iterator[_Array]:
    if array.flags.c_contiguous:
        yield array.reshape(-1)
        return
    rows = max(1, _CHUNK_BYTES * len(array) // max(1, array.nbytes))
    for start in range(0, len(array), rows):
        yield np.ascontiguousarray(array[start : start + rows])
