"""A 64-bit checksum made of integer operations that every device has, computed where the tensor is."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

_ROW = 1 << 18
"""32-bit words that share one table of weights (2 MiB)."""
_ROWS_AT_ONCE = 16
"""Bounds the 64-bit temporaries to 32 MiB each."""
_LIMBS = 4
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def device_checksum(tensor: torch.Tensor) -> int:
    """Checksum of the elements' bytes in row-major order; dtype and shape are not part of it.

    Each row of 32-bit words w becomes sum_i m_i * w_i mod 2**64 with fixed 64-bit weights m: multilinear hashing, in
    which two rows that differ collide with a chance below 2**-32 (Lemire and Kaser, Strongly universal string hashing
    is fast, 2014). Integer sums do not depend on their order, so the result is the same on every device and at every
    run, also where a device's integers do not wrap around (`_by_limbs`). The host folds the rows, the 0 to 3 bytes
    after the last word, and the number of bytes with splitmix64.

    Raises:
        ArithmeticError: the device's integers are not to be trusted.
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
    weighted = _form(words.device)
    sums: list[torch.Tensor] = []
    for start in range(0, full, _ROWS_AT_ONCE):
        rows = words[start * _ROW : min(start + _ROWS_AT_ONCE, full) * _ROW].view(-1, _ROW)
        sums.append(weighted(rows, weights))
    if rest := words.numel() - full * _ROW:
        sums.append(weighted(words[full * _ROW :].view(1, -1), weights[:rest]))
    return _folded(torch.cat(sums)) if sums else []


def _wrapping(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """int64 [rows, 1]: sum_i m_i * w_i of each row, modulo 2**64, where the device's integers wrap around."""
    return (words.to(torch.int64) * weights).sum(dim=1, keepdim=True)


def _by_limbs(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """int64 [rows, 4]: the same sum as sum_j 2**(16 j) * limbs_j, from products that stay below 2**50 in magnitude.

    For devices whose 64-bit products or sums do not wrap around. w = w_1 * 2**16 + w_0 with a signed w_1, m by four
    limbs of 16 bits; what would be multiplied by 2**64 falls away.
    """
    low, high = (words & 0xFFFF).to(torch.int64), (words >> 16).to(torch.int64)
    parts = [((weights >> 16 * j) & 0xFFFF) for j in range(_LIMBS)]
    sums = [(low * part).sum(dim=1) for part in parts]
    for j, part in enumerate(parts[:-1]):
        sums[j + 1] = sums[j + 1] + (high * part).sum(dim=1)
    return torch.stack(sums, dim=1)


def _folded(sums: torch.Tensor) -> list[int]:
    """Each row of [rows, limbs] as one integer."""
    return [sum(limb << 16 * j for j, limb in enumerate(row)) for row in sums.tolist()]


def wraps_around(device: torch.device) -> bool:
    """Whether the device computes the checksum in its fast form."""
    return _form(device) is _wrapping


@lru_cache(maxsize=8)
def _form(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The fastest form whose result on the device is that of plain integers.

    Raises:
        ArithmeticError: none is.
    """
    words = np.array([1, -1, 2**31 - 1, -(2**31), 0x12345678, -0x789ABCDE + 2**31, 65535, -65536] * 512, dtype=np.int32)
    weights = _weights(device)[: len(words)]
    words = words[: len(weights)]
    pairs = zip(words.tolist(), weights.tolist(), strict=True)
    right = sum(word * weight for word, weight in pairs) & _MASK
    for form in (_wrapping, _by_limbs):
        if _folded(form(torch.from_numpy(words).to(device).view(1, -1), weights))[0] & _MASK == right:
            return form
    raise ArithmeticError(
        f"{device}: sums of 64-bit integers are wrong there, and the weight sync could not be verified"
    )


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
