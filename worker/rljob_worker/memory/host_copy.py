"""A copy of device memory in pinned host memory that can be read without the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

_SMALLEST = 32 * 1024**2
"""Bytes of the smallest piece."""


def piece_sizes(nbytes: int) -> list[int]:
    """Sizes of pinned pieces, largest first, that hold `nbytes`: at most one smallest piece more than needed.

    torch rounds a pinned allocation up to a power of two, up to twice its size; a sum of powers of two is not rounded.
    """
    whole = -(-nbytes // _SMALLEST) * _SMALLEST
    return [1 << bit for bit in reversed(range(whole.bit_length())) if whole >> bit & 1]


@dataclass(frozen=True, slots=True)
class _Part:
    """`length` bytes from `start` of a copy lie at `at` of piece `piece`."""

    piece: int
    at: int
    start: int
    length: int


def parts(sizes: Sequence[int], start: int, length: int) -> Iterator[_Part]:
    """Places of the bytes [start, start + length) in pieces of `sizes` bytes."""
    first = 0
    for number, size in enumerate(sizes):
        low, high = max(start, first), min(start + length, first + size)
        if low < high:
            yield _Part(number, low - first, low, high - low)
        first += size


class HostCopy:
    """Room on the host for `nbytes` bytes; allocated at once and kept."""

    def __init__(self, nbytes: int, *, pinned: bool = True) -> None:
        self.nbytes = nbytes
        self._sizes = piece_sizes(nbytes)
        self._pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in self._sizes]

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that it holds."""
        return sum(self._sizes)

    def store(self, source: torch.Tensor) -> None:
        """Start copying `source`, uint8 [nbytes] on a device, here; complete after the device's synchronize."""
        for part in parts(self._sizes, 0, self.nbytes):
            self._of(part).copy_(source[part.start : part.start + part.length], non_blocking=True)

    def load(self, target: torch.Tensor) -> None:
        """Start copying back into `target`, uint8 [nbytes]; complete after the device's synchronize."""
        for part in parts(self._sizes, 0, self.nbytes):
            target[part.start : part.start + part.length].copy_(self._of(part), non_blocking=True)

    def read(self, start: int, length: int) -> torch.Tensor:
        """Bytes [start, start + length) as uint8 [length]: a view, or a copy where they lie in several pieces."""
        found = [self._of(part) for part in parts(self._sizes, start, length)]
        return found[0] if len(found) == 1 else torch.cat(found or [torch.empty(0, dtype=torch.uint8)])

    def _of(self, part: _Part) -> torch.Tensor:
        return self._pieces[part.piece][part.at : part.at + part.length]
