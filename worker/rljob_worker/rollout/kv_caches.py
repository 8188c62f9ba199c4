"""The memory of a vLLM worker's KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def kv_cache_storages(kv_caches: Iterable[Any]) -> dict[int, int]:
    """Address -> bytes of each distinct storage; layers may have one tensor, or one for keys and one for values."""
    storages = (tensor.untyped_storage() for tensor in _tensors(kv_caches))
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
