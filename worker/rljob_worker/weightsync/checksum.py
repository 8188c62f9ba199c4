"""Checksums of weights on the host: xxh3, 64 bit, over the elements' bytes in row-major order.

Everything here runs on the calling thread alone: torch would wake all its threads for each copy, and those cores belong
to the other side of the sync.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

# Small enough that what was hashed is still in the cache when it is copied.
_CHUNK_BYTES = 1 << 20
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_Array = npt.NDArray[Any]


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
    read, write = _array(source), _array(target)
    if not (read.flags.c_contiguous and write.flags.c_contiguous):
        np.copyto(write, read)
        return checksum(source)
    digest = xxhash.xxh3_64()
    flat_read, flat_write = read.reshape(-1), write.reshape(-1)
    step = _CHUNK_BYTES // max(1, read.itemsize)
    for start in range(0, read.size, step):
        chunk = flat_read[start : start + step]
        digest.update(chunk.data)
        flat_write[start : start + step] = chunk
    return digest.intdigest()


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
