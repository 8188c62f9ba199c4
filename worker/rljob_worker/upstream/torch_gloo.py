"""One event loop for all gloo groups of a process."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache

import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroupGloo, Store

from rljob_worker.upstream.patch import TORCH, Patch, Process


@cache
def _devices() -> list[ProcessGroupGloo.Device]:
    """Devices that torch makes anew for each group: one for each interface that is named, else the default one."""
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


def _share_loop() -> None:
    """Groups made from now on have one thread together that waits for their sockets."""
    c10d.ProcessGroupGloo = _OnSharedLoop  # type: ignore[misc]


PATCHES = (
    Patch(
        "torch-gloo-loop",
        ("torch.distributed.distributed_c10d.ProcessGroupGloo",),
        {"torch": TORCH},
        "each gloo group has a thread that wakes a hundred times a second; Megatron and vLLM make dozens of groups: "
        "asleep, the two of them took 5 % of a core from the one that worked",
        "tests/worker/upstream/test_gloo.py::test_groups_on_a_shared_loop_work_fail_and_take_a_thread_less_each",
        _share_loop,
        (Process.TRAINER, Process.ENGINE_WORKER),
    ),
)
