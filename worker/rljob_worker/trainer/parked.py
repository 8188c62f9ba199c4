"""Weights that are on the device only while they are computed with."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rljob_worker.tensor_slice import storage_of


class ParkedWeights:
    """Frozen tensors whose memory is on the host; on the device only inside the context.

    Each storage is emptied, not replaced: modules and communication libraries keep their views.

    Args:
        tensors: with their values; they are parked at once.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._bytes = [_bytes_of(tensor) for tensor in {storage_of(tensor): tensor for tensor in tensors}.values()]
        self._sizes = [of_all.untyped_storage().nbytes() for of_all in self._bytes]
        self._host = [of_all.to("cpu", copy=True) for of_all in self._bytes]
        self._leave()

    @property
    def resident_bytes(self) -> int:
        """Bytes that are on the device now."""
        return sum(of_all.untyped_storage().nbytes() for of_all in self._bytes)

    def __enter__(self) -> None:
        for of_all, size, host in zip(self._bytes, self._sizes, self._host, strict=True):
            of_all.untyped_storage().resize_(size)
            of_all.copy_(host)

    def __exit__(self, *_exc: object) -> None:
        self._leave()

    def _leave(self) -> None:
        for of_all in self._bytes:
            of_all.untyped_storage().resize_(0)


def _bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage, over that storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
