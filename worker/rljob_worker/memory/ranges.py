"""Ranges of addresses that tensors are placed in, and what becomes of their pages while asleep."""

from __future__ import annotations

import ctypes
import os
from collections import deque

from rljob_worker.host.memory import resident_bytes
from rljob_worker.memory.blocks import BlockAllocator
from rljob_worker.memory.rollback import Rollback
from rljob_worker.memory.virtual import HUGE_PAGE, PROT_NONE, PROT_READ, PROT_WRITE, VirtualMemory, round_up

_READ_WRITE = PROT_READ | PROT_WRITE
_COMMIT_BYTES = 64 * 1024 * 1024
_GUARD = HUGE_PAGE
"""Bytes behind each range that never get access, so that the kernel does not merge two ranges into one mapping."""


class PageRange:
    """Addresses `[base, base + capacity)`; the part up to `committed` is accessible while awake."""

    def __init__(self, memory: VirtualMemory, capacity: int) -> None:
        self.capacity = capacity
        self._memory = memory
        self.base = memory.reserve(capacity + _GUARD)
        memory.prefer_huge_pages(self.base, capacity)
        self.blocks = BlockAllocator(capacity)
        self.freed: deque[int] = deque()
        """Offsets whose storage died; filled by finalizers, which may run on any thread and inside any call."""
        self._extents: list[tuple[int, int]] = []
        """(offset, length), contiguous from 0, each made accessible in one call and so inside one kernel mapping."""

    @property
    def committed(self) -> int:
        """Bytes from `base` on that were ever made accessible."""
        return sum(self._extents[-1]) if self._extents else 0

    def commit(self, end: int) -> None:
        """Make `[0, end)` accessible; grows by at least half, so that a large range has few extents."""
        start = self.committed
        if end <= start:
            return
        goal = max(round_up(end, _COMMIT_BYTES), round_up(start + start // 2, _COMMIT_BYTES))
        length = min(goal, self.capacity) - start
        self._memory.protect(self.base + start, length, _READ_WRITE)
        self._extents.append((start, length))

    def collect(self) -> None:
        """Take note of the blocks whose storages died."""
        while self.freed:
            self.blocks.free(self.freed.popleft())

    def offset_of(self, address: int) -> int | None:
        """Offset of an address in the range, None outside of it."""
        offset = address - self.base
        return offset if 0 <= offset < self.capacity else None

    def resident_bytes(self) -> int:
        """Bytes of physical memory behind the range, by /proc/self/smaps."""
        return resident_bytes([(self.base, self.base + self.capacity)])

    def sleep(self, rollback: Rollback) -> None:
        """Give the pages away and close the range."""
        raise NotImplementedError

    def wake(self, rollback: Rollback) -> None:
        """Open the range again."""
        raise NotImplementedError

    def release(self) -> None:
        """Unmap the range."""
        self._memory.release(self.base, self.capacity + _GUARD)

    def _protect(self, base: int, protection: int) -> None:
        if self.committed:
            self._memory.protect(base, self.committed, protection)


class DiscardRange(PageRange):
    """Drops its pages; reads zero after waking up."""

    def sleep(self, rollback: Rollback) -> None:
        """See `PageRange`; dropping is the last step, because it cannot be undone."""
        rollback(lambda: self._protect(self.base, _READ_WRITE))
        self._protect(self.base, PROT_NONE)
        if self.committed:
            self._memory.drop(self.base, self.committed)

    def wake(self, rollback: Rollback) -> None:
        """Wake as declared."""
        rollback(lambda: self._protect(self.base, PROT_NONE))
        self._protect(self.base, _READ_WRITE)


class BackupRange(PageRange):
    """Moves its pages to `[backup_base, backup_base + capacity)`, which can be read while asleep."""

    def __init__(self, memory: VirtualMemory, capacity: int) -> None:
        super().__init__(memory, capacity)
        self.backup_base = memory.reserve(capacity + _GUARD)
        self._try_kernel()

    def backup_resident_bytes(self) -> int:
        """Bytes of physical memory behind the backup addresses, by /proc/self/smaps."""
        return resident_bytes([(self.backup_base, self.backup_base + self.capacity)])

    def sleep(self, rollback: Rollback) -> None:
        """See `PageRange`. The pages of free blocks are given back."""
        self._drop_free_pages()
        rollback(lambda: self._protect(self.backup_base, PROT_NONE))
        self._move_all(self.base, self.backup_base, rollback)
        rollback(lambda: self._protect(self.base, _READ_WRITE))
        self._protect(self.base, PROT_NONE)
        rollback(lambda: self._protect(self.backup_base, _READ_WRITE))
        self._protect(self.backup_base, PROT_READ)

    def wake(self, rollback: Rollback) -> None:
        """See `PageRange`. The target of a move takes the rights of its source, hence the rights before the moves."""
        rollback(lambda: self._protect(self.backup_base, PROT_READ))
        rollback(lambda: self._protect(self.base, PROT_NONE))
        self._protect(self.backup_base, _READ_WRITE)
        self._move_all(self.backup_base, self.base, rollback)
        rollback(lambda: self._protect(self.backup_base, _READ_WRITE))
        self._protect(self.backup_base, PROT_NONE)

    def release(self) -> None:
        """Unmap the range and its backup."""
        super().release()
        self._memory.release(self.backup_base, self.capacity + _GUARD)

    def _move_all(self, source: int, target: int, rollback: Rollback) -> None:
        for start, length in self._extents:
            self._move(source + start, target + start, length, rollback)

    def _move(self, source: int, target: int, length: int, rollback: Rollback) -> None:
        self._memory.move(source, target, length)
        rollback(lambda: self._memory.move(target, source, length))

    def _drop_free_pages(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        for start, length in self.blocks.free_blocks():
            first, last = round_up(start, page), (start + length) // page * page
            if last > first:
                self._memory.drop(self.base + first, last - first)

    def _try_kernel(self) -> None:
        # A kernel that cannot move pages is to be found out now, not at the first sleep after an hour of training.
        self.commit(1)
        ctypes.c_uint8.from_address(self.base).value = 1
        self._memory.move(self.base, self.backup_base, self.committed)
        self._memory.move(self.backup_base, self.base, self.committed)
        self._memory.protect(self.backup_base, self.committed, PROT_NONE)
        self._memory.drop(self.base, self.committed)
