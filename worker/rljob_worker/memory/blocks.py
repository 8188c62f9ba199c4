"""First-fit block allocation over offsets: pure bookkeeping, no memory is touched."""

from __future__ import annotations

import bisect

ALIGNMENT = 64
"""Bytes: what torch's own CPU allocator guarantees."""


class BlockAllocator:
    """Hands out `[0, capacity)` in blocks of whole `ALIGNMENT`s; freed blocks are merged and reused, lowest first.

    `top` is the end of the highest byte ever handed out: beyond it memory was never touched.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.top = 0
        self.used = 0
        self._free_starts: list[int] = []
        self._free_lengths: dict[int, int] = {}
        self._live: dict[int, int] = {}

    def allocate(self, nbytes: int) -> tuple[int, bool]:
        """Offset of a block of at least `nbytes` and whether it is fresh (never handed out before).

        Raises MemoryError when nothing fits.
        """
        length = max(-(-nbytes // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
        for index, start in enumerate(self._free_starts):
            available = self._free_lengths[start]
            if available >= length:
                self._take_free(index, start, available, length)
                self._hold(start, length)
                return start, False
        if self.top + length > self.capacity:
            raise MemoryError(
                f"{nbytes} bytes do not fit: {self.used} of {self.capacity} reserved bytes are in use, "
                f"{self.capacity - self.top} were never used"
            )
        start = self.top
        self.top += length
        self._hold(start, length)
        return start, True

    def free(self, start: int) -> None:
        """Give a block back; KeyError when no block starts there."""
        length = self._live.pop(start)
        self.used -= length
        index = bisect.bisect_left(self._free_starts, start)
        if index < len(self._free_starts) and start + length == self._free_starts[index]:
            length += self._free_lengths.pop(self._free_starts.pop(index))
        if index and self._free_starts[index - 1] + self._free_lengths[self._free_starts[index - 1]] == start:
            self._free_lengths[self._free_starts[index - 1]] += length
            return
        self._free_starts.insert(index, start)
        self._free_lengths[start] = length

    def free_blocks(self) -> list[tuple[int, int]]:
        """(offset, length) of every free block below `top`, ascending, no two adjacent."""
        return [(start, self._free_lengths[start]) for start in self._free_starts]

    @property
    def live_blocks(self) -> int:
        """Number of blocks in use."""
        return len(self._live)

    def _hold(self, start: int, length: int) -> None:
        self._live[start] = length
        self.used += length

    def _take_free(self, index: int, start: int, available: int, length: int) -> None:
        del self._free_lengths[start]
        if available == length:
            del self._free_starts[index]
        else:
            self._free_starts[index] = start + length
            self._free_lengths[start + length] = available - length
