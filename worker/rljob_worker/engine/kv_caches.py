"""The memory of a vLLM worker's KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias, Union

import torch

KvCaches: TypeAlias = Sequence[Union[torch.Tensor, "KvCaches", None]]
"""A layer has one tensor, or one for keys and one for values; some kinds of attention leave places empty."""


def kv_cache_storages(kv_caches: KvCaches) -> dict[int, int]:
    """Address -> bytes of each distinct storage."""
    storages = (tensor.untyped_storage() for tensor in _tensors(kv_caches))
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _tensors(kv_caches: KvCaches) -> Iterator[torch.Tensor]:
    for item in kv_caches:
        if isinstance(item, torch.Tensor):
            yield item
        elif item is not None:
            yield from _tensors(item)
