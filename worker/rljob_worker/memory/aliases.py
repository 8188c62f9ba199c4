"""Which tensor objects share a storage."""

from __future__ import annotations

import gc

import torch


def views_of(storages: dict[int, torch.UntypedStorage]) -> dict[int, list[torch.Tensor]]:
    """Every tensor object over each storage; ValueError when a storage has holders that are not tensor objects."""
    views: dict[int, list[torch.Tensor]] = {key: [] for key in storages}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided and thing.device.type == "cpu":
            key = thing.untyped_storage()._cdata
            if key in views:
                views[key].append(thing)
    for key, storage in storages.items():
        if storage.device.type != "cpu":
            raise ValueError(f"adopt: a storage of {storage.nbytes()} bytes is on {storage.device}, not on the CPU")
        holders = torch._C._storage_Use_Count(key)
        if holders != len(views[key]) + 1:
            raise ValueError(
                f"adopt: a storage of {storage.nbytes()} bytes has {holders - 1} holders, {len(views[key])} of them "
                "tensors that Python sees; moving it would split aliases"
            )
    return views
