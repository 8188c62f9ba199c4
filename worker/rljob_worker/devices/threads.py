"""Number of threads of a process while the other side of the sync works on the same cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def half_the_threads() -> Iterator[None]:
    """Run torch's operators on half of this process's threads.

    A trainer and the engine beside it are given the same cores. While both work, threads for all of them would mostly
    wait for each other at the end of every copy: on 2 cores, landing took three times as long.

    Threads that vLLM has bound to cores are left alone: new ones would not be bound.
    """
    threads = torch.get_num_threads()
    if threads == 1 or os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind") != "nobind":
        yield
        return
    # vLLM makes `torch.set_num_threads` do nothing, to protect bound threads.
    torch._C.set_num_threads(threads // 2)
    try:
        yield
    finally:
        torch._C.set_num_threads(threads)
