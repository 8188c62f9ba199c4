"""CPU threads of processes that share a machine."""

from __future__ import annotations

import os


def threads_per_process(asked: int | None, sharers: int) -> int:
    """The requested number, or an equal share of the cores that this process may use, at least 1.

    Args:
        asked: threads by the user's wish; None: the share.
        sharers: processes that work at the same time.
    """
    return asked or max(1, len(os.sched_getaffinity(0)) // sharers)
