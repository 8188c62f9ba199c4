"""A 64-bit checksum made of integer operations that every device has, computed where the tensor is."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

_ROW = 1 << 18
"""32-bit words that share one table of weights (2 MiB)."""
_ROWS_AT_ONCE = 16
"""Bounds the 64-bit temporaries to 32 MiB each."""
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def device_checksum(tensor: torch.Tensor) -> int:
    """Checksum of the elements' bytes in row-major order; dtype and shape are not part of it.

    Each row of 32-bit words w becomes sum_i m_i * w_i mod 2**64 with fixed 64-bit weights m: multilinear hashing, in
    which two rows that differ collide with a chance below 2**-32 (Lemire and Kaser, Strongly universal string hashing
    is fast, 2014). Integer sums do not depend on their order, so the result is the same on every device and at every
    run. The host folds the rows, the 0 to 3 bytes after the last word, and the number of bytes with splitmix64.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 4 * 4
    value = 0
    for row in _row_sums(data[:whole]):
        value = _mix(value ^ (row & _MASK))
    tail = int.from_bytes(bytes(data[whole:].tolist()), "little")
    return _mix(_mix(value ^ tail) ^ data.numel())


def _row_sums(data: torch.Tensor) -> list[int]:
    if data.storage_offset() % 4:
        data = data.clone()
    words = data.view(torch.int32)
    weights = _weights(words.device)
    full = words.numel() // _ROW
    sums: list[torch.Tensor] = []
    for start in range(0, full, _ROWS_AT_ONCE):
        rows = words[start * _ROW : min(start + _ROWS_AT_ONCE, full) * _ROW].view(-1, _ROW)
        sums.append((rows.to(torch.int64) * weights).sum(dim=1))
    if rest := words.numel() - full * _ROW:
        sums.append((words[full * _ROW :].to(torch.int64) * weights[:rest]).sum().reshape(1))
    return torch.cat(sums).tolist() if sums else []


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> torch.Tensor:
    """int64 [_ROW], odd: splitmix64 of 1, 2, 3, ..."""
    x = np.arange(1, _ROW + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(x.view(np.int64)).to(device)


def _mix(x: int) -> int:
    """splitmix64's next output from state `x`."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
