"""One event loop for all gloo groups of a process."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroupGloo, Store


@cache
def _devices() -> list[Any]:
    """What torch makes anew for each group: one device for each interface that is named, else the default one."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not names:
        return [ProcessGroupGloo.create_default_device()]
    return [ProcessGroupGloo.create_device(interface=name) for name in names]


class _OnSharedLoop(ProcessGroupGloo):
    """A group whose sockets belong to the process's one loop."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = _devices()
        options._threads = 2 * len(options._devices)
        options._timeout = timeout
        super().__init__(store, rank, size, options)


def share_gloo_loop() -> None:
    """Give the groups made from now on one thread together that waits for their sockets.

    By default each has its own, which wakes a hundred times a second. Megatron and vLLM make dozens of groups: asleep,
    the two of them took 5 % of a core from the one that worked, and each wake-up held up all of its threads.
    """
    c10d.ProcessGroupGloo = _OnSharedLoop  # type: ignore[misc]
