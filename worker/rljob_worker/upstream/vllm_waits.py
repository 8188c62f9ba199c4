"""Waits of the processes of a tensor-parallel engine for one another, where they share cores with the trainers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from rljob_worker.upstream.patch import VLLM, Patch, Process, put

SPIN_SECONDS = 0.002
"""After a message, until a process sleeps: longer than vLLM's scheduler takes between two tokens."""


class _Condition(Protocol):
    last_read: float
    busy_loop_s: float


C = TypeVar("C", bound=_Condition)


def sleep_soon() -> None:
    """Have the readers of vLLM's queues in shared memory sleep until they are notified, after a short spin."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    put(SpinCondition, wait=soon_asleep(SpinCondition.wait))


def soon_asleep(wait: Callable[[C, int | None], None]) -> Callable[[C, int | None], None]:
    """vLLM's `SpinCondition.wait`, which spins as long as ever until a notification has come once.

    Before, the writer may not know yet that the reader listens, and its notification would be lost.
    """

    def wait_for_data(condition: C, timeout_ms: int | None = None) -> None:
        began = time.monotonic()
        sleeps = began > condition.last_read + condition.busy_loop_s
        wait(condition, timeout_ms)
        if sleeps and (timeout_ms is None or 1000 * (time.monotonic() - began) < timeout_ms):
            condition.busy_loop_s = SPIN_SECONDS

    return wait_for_data


PATCHES = (
    Patch(
        "vllm-workers-sleep",
        ("vllm.distributed.device_communicators.shm_broadcast.SpinCondition.wait",),
        {"vllm": VLLM},
        "for a second after each message vLLM's workers take all of a core, and trainers, whose turn it is, get half",
        "tests/worker/upstream/test_vllm_waits.py::test_a_reader_that_was_notified_once_spins_no_longer",
        sleep_soon,
        (Process.ENGINE, Process.ENGINE_WORKER),
        ("cpu",),
    ),
)
