"""The two staging slots in host memory: files in /dev/shm, which trainers write and engines read.

Checksums are xxh3, 64 bit, over the elements' bytes in row-major order. Everything here runs on the calling thread
alone: torch would wake all its threads for each copy, and those cores belong to the other side of the sync.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from rljob_worker.errors import WeightSyncError
from rljob_worker.host import staging_slots
from rljob_worker.host.staging_slots import SHARED_MEMORY
from rljob_worker.weightsync.slots import SLOT_COUNT, Batch, Checksum, Digest, Move, view_of

# Small enough that what was hashed is still in a core's own cache when it is copied.
_CHUNK_BYTES = 1 << 18
SCRATCH_BYTES = 1 << 19
"""Stays in a core's cache too: values are rounded into it, summed there and copied from it. In whole tensors this takes
3.6 times as long."""
_CAST_AT_ONCE = 1 << 15
"""Elements that torch casts on the calling thread alone."""
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_Array = npt.NDArray[np.generic]


class Filling:
    """A batch whose digest is xxh3_64 over the bytes of its sources (CPU), which are never summed where they went."""

    def __init__(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], scratch: torch.Tensor) -> None:
        """Find the blocks.

        Args:
            copies: source and target, of one shape.
            scratch: uint8, for values that are rounded on the way.
        """
        self._steps: list[Callable[[xxhash.xxh3_64], None]] = []
        blocks: list[tuple[_Array, _Array]] = []
        for source, target in copies:
            if source.dtype == target.dtype:
                blocks += _blocks_of_both(source, target)
                continue
            self._steps += [partial(_fill, _Hashed.of(blocks)), partial(_cast, source, target, scratch)]
            blocks = []
        self._steps.append(partial(_fill, _Hashed.of(blocks)))

    def run(self) -> int:
        """See `slots.Batch`."""
        digest = xxhash.xxh3_64()
        for step in self._steps:
            step(digest)
        return digest.intdigest()


class Landing:
    """A batch whose digest is xxh3_64 over the bytes of what each move sums (CPU), while they are in the cache."""

    def __init__(self, moves: Sequence[Move]) -> None:
        """Find the blocks."""
        self._steps: list[Callable[[xxhash.xxh3_64], None]] = []
        blocks: list[tuple[_Array, _Array]] = []
        for move in moves:
            if _fused(move):
                assert move.source is not None
                assert move.target is not None
                blocks += _blocks_of_both(move.source, move.target)
                continue
            self._steps += [partial(_land, _Hashed.of(blocks)), partial(_move, move)]
            blocks = []
        self._steps.append(partial(_land, _Hashed.of(blocks)))

    def run(self) -> int:
        """See `slots.Batch`."""
        digest = xxhash.xxh3_64()
        for step in self._steps:
            step(digest)
        return digest.intdigest()


class HostDigest:
    """See `slots.Digest`."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()

    def add(self, move: Move) -> None:
        """Copy, and sum what is to be summed."""
        if _fused(move):
            assert move.source is not None
            assert move.target is not None
            _land(_Hashed.of(list(_blocks_of_both(move.source, move.target))), self._digest)
        else:
            _move(move, self._digest)

    def begun(self) -> int:
        """The value."""
        return self._digest.intdigest()


@dataclass(frozen=True, slots=True)
class _Hashed:
    """Blocks to copy, and which of the two arrays can be summed as it is."""

    read: _Array
    write: _Array
    read_bytes: memoryview | None
    """Bytes of `read`, where they can be summed without a copy."""
    write_bytes: memoryview | None

    @classmethod
    def of(cls, blocks: Sequence[tuple[_Array, _Array]]) -> list[_Hashed]:
        """Hashed blocks of these pairs."""
        return [cls(read, write, _bytes(read), _bytes(write)) for read, write in blocks if read.size]


def _bytes(array: _Array) -> memoryview | None:
    return array.data if array.flags.c_contiguous else None


def _fill(blocks: Sequence[_Hashed], digest: xxhash.xxh3_64) -> None:
    for block in blocks:
        digest.update(np.ascontiguousarray(block.read).data if block.read_bytes is None else block.read_bytes)
        np.copyto(block.write, block.read)


def _land(blocks: Sequence[_Hashed], digest: xxhash.xxh3_64) -> None:
    for block in blocks:
        np.copyto(block.write, block.read)
        digest.update(np.ascontiguousarray(block.write).data if block.write_bytes is None else block.write_bytes)


def _fused(move: Move) -> bool:
    """Whether what is summed is what was just written, in the number format in which it came."""
    return move.target is not None and move.summed is move.target


def _move(move: Move, digest: xxhash.xxh3_64) -> None:
    if move.target is not None and move.source is not None:
        move.target.copy_(move.source)
    if move.summed is not None:
        for block in _contiguous_blocks(_array(move.summed)):
            digest.update(block.data)


def _cast(source: torch.Tensor, target: torch.Tensor, scratch: torch.Tensor, digest: xxhash.xxh3_64) -> None:
    """Copy `source` into `target` (CPU, same shape) in its dtype, and sum what is sent.

    Bytes are hashed where they were cast to, in `scratch` (uint8), never where they went.
    """
    room = scratch.view(target.dtype)
    for read, write in _pairs(source.detach(), target, len(room)):
        cast = room[: read.numel()].view(read.shape)
        for wide, narrow in _pairs(read, cast, _CAST_AT_ONCE):
            narrow.copy_(wide)
        sent = _array(cast)
        digest.update(sent.data)
        np.copyto(_array(write), sent)


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

    def filling(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Batch:
        """See `Slots`."""
        if self._scratch is None:
            self._scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8)
        return Filling(copies, self._scratch)

    def landing(self, moves: Sequence[Move]) -> Batch:
        """See `Slots`."""
        return Landing(moves)

    def checksums(self, begun: Sequence[Checksum]) -> list[int]:
        """They are there."""
        return [each for each in begun if isinstance(each, int)]

    def digest(self) -> Digest:
        """See `Slots`."""
        return HostDigest()

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
