"""Bytes that are copied to a device and are there at once, as far as a CPU shows them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Brought(TorchDispatchMode):
    """Counts the bytes of copies that are there at once."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[Tensor]] = []
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self._made.append(weakref.ref(result))
            there = [tensor for made in self._made if (tensor := made()) is not None]
            self.peak = max(self.peak, sum(tensor.nbytes for tensor in there))
        return result
