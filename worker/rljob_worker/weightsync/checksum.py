"""Checksums of weights on the host: xxh3, 64 bit, over the elements' bytes in row-major order."""

from __future__ import annotations

import torch
import xxhash

# Small enough that what was hashed is still in the cache when it is copied.
_CHUNK_BYTES = 1 << 20


def checksum(tensor: torch.Tensor) -> int:
    """xxh3_64 of a CPU tensor of any strides and dtype; shape and dtype are not part of it."""
    digest = xxhash.xxh3_64()
    for block in _contiguous_blocks(tensor):
        digest.update(_buffer(_bytes(block)))
    return digest.intdigest()


def copy_with_checksum(source: torch.Tensor, target: torch.Tensor) -> int:
    """Copy `source` into `target` (CPU, same shape and dtype) and return the checksum of `source`.

    Bytes are hashed where they come from, never where they went.
    """
    if not source.is_contiguous():
        source = source.contiguous()
    if not target.is_contiguous():
        value = checksum(source)
        target.copy_(source)
        return value
    digest = xxhash.xxh3_64()
    read, write = _buffer(_bytes(source)), _buffer(_bytes(target))
    for start in range(0, len(read), _CHUNK_BYTES):
        chunk = read[start : start + _CHUNK_BYTES]
        digest.update(chunk)
        # One memcpy: torch would wake all its threads for each chunk, and the engine is landing on those cores.
        write[start : start + len(chunk)] = chunk
    return digest.intdigest()


def _buffer(flat: torch.Tensor) -> memoryview:
    return flat.numpy().data


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Not reshape: it keeps odd strides where there is one element, and those cannot be viewed as bytes.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _contiguous_blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.is_contiguous() or tensor.dim() == 0:
        return (tensor.contiguous(),)
    rows = max(1, _CHUNK_BYTES * tensor.shape[0] // max(1, tensor.nbytes))
    return tuple(block.contiguous() for block in tensor.split(rows))
