"""The two staging slots: files in /dev/shm that trainers write and engines read through mappings of their own."""

from __future__ import annotations

import errno
import mmap
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from rljob_worker.rollout.guardian import start_time
from rljob_worker.weightsync import checksum as host
from rljob_worker.weightsync.errors import WeightSyncError

SLOT_COUNT = 2
SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"rljob-(?P<run>[A-Za-z0-9_.]+)-(?P<namespace>\d+)-(?P<pid>\d+)-(?P<started>\d+)-(?P<index>\d+)")


class Slots:
    """Shared mappings of both slots, kept over syncs: their pages are touched once."""

    beside = True

    def __init__(self, names: Sequence[str], slot_bytes: int, *, owner: bool) -> None:
        """Map existing slots; use `create` or `attach`.

        Raises:
            WeightSyncError: a slot is gone or has another size.
        """
        self.names = tuple(names)
        self.slot_bytes = slot_bytes
        self._owner = owner
        self._views = [_map(name, slot_bytes) for name in self.names]

    @classmethod
    def create(cls, run: str, slot_bytes: int) -> Slots:
        """Make both slots, after removing those whose owner is dead; `close` removes them.

        Args:
            run: letters, digits, `_` and `.`: tells runs apart.
            slot_bytes: size of each slot.

        Raises:
            WeightSyncError: /dev/shm has too little room.
            ValueError: an impossible `run` or size.
        """
        names = [
            f"rljob-{run}-{_pid_namespace()}-{os.getpid()}-{start_time(os.getpid())}-{i}" for i in range(SLOT_COUNT)
        ]
        if slot_bytes < 1 or not all(_NAME.fullmatch(name) for name in names):
            raise ValueError(f"slots of run {run!r}, {slot_bytes} bytes: run may hold letters, digits, '_' and '.'")
        sweep()
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
    def attach(cls, names: Sequence[str], slot_bytes: int) -> Slots:
        """Map slots that another process made."""
        return cls(names, slot_bytes, owner=False)

    @property
    def owned_bytes(self) -> int:
        """Size of both slots where this object made them; 0 where another did."""
        return len(self.names) * self.slot_bytes if self._owner else 0

    def bytes_of(self, index: int) -> torch.Tensor:
        """A slot as uint8 [slot_bytes]; a view, which must not outlive this object's `close`."""
        return self._views[index]

    def tensor(self, index: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The view of `shape` and `dtype` that starts at `offset` bytes."""
        return view_of(self._views[index], offset, dtype, shape)

    def fill(self, source: torch.Tensor, target: torch.Tensor) -> int:
        """Copy `source` into `target`; the checksum of `source`."""
        return host.copy_with_checksum(source, target)

    def checksum(self, tensor: torch.Tensor) -> int:
        """xxh3_64 of the bytes."""
        return host.checksum(tensor)

    def settle(self) -> None:
        """Nothing to wait for: copies on the CPU are done when they return."""

    def close(self) -> None:
        """Drop the mappings, and remove the files when this is the owner; nothing the second time."""
        self._views = []
        if self._owner:
            for name in self.names:
                (SHARED_MEMORY / name).unlink(missing_ok=True)


def view_of(slot: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The view of `shape` and `dtype` that starts at `offset` bytes of a slot uint8 [slot_bytes]."""
    nbytes = dtype.itemsize * torch.Size(shape).numel()
    return slot[offset : offset + nbytes].view(dtype).view(shape)


def sweep() -> list[str]:
    """Remove the slots of owners that are dead; returns their names.

    Slots made in another PID namespace (a container that shares /dev/shm) are left alone: their owners are not to be
    seen from here.
    """
    removed = []
    for path in SHARED_MEMORY.glob("rljob-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or int(match["namespace"]) != _pid_namespace():
            continue
        if start_time(int(match["pid"])) != match["started"]:
            with suppress(PermissionError):  # another user's: theirs to remove
                path.unlink(missing_ok=True)
                removed.append(path.name)
    return removed


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


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
