"""Bytes that are brought to a device and are there at once, as far as a CPU shows them."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_MAKES_ROOM = (torch.ops.aten.empty.memory_format, torch.ops.aten._to_copy.default)


class Brought(TorchDispatchMode):
    """Counts the bytes of buffers and copies that are there at once."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[StorageWeakRef, int]] = []
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _MAKES_ROOM:
            self._made.append((StorageWeakRef(result.untyped_storage()), result.nbytes))
            self.peak = max(self.peak, sum(nbytes for storage, nbytes in self._made if not storage.expired()))
        return result
