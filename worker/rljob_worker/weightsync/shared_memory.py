"""The two staging slots in host memory: files in /dev/shm, which trainers write and engines read.

Checksums are xxh3, 64 bit, over the elements' bytes in row-major order. Everything here runs on the calling thread
alone: torch would wake all its threads for each copy, and those cores belong to the other side of the sync.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence

import torch

from rljob_worker.errors import WeightSyncError
from rljob_worker.host import staging_slots
from rljob_worker.host.staging_slots import SHARED_MEMORY
from rljob_worker.weightsync.host_batches import SCRATCH_BYTES, Filling, HostDigest, Landing
from rljob_worker.weightsync.slots import SLOT_COUNT, Batch, Checksum, Digest, Move, view_of


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
