"""CPU threads of trainer and engine processes."""

from __future__ import annotations

import os

from rljob_api import derived
from rljob_api.spec import RLJobSpec


def threads_per_process(spec: RLJobSpec) -> int:
    """`resources.threadsPerDevice`, or an equal share of the cores that this process may use.

    Trainer and engine of a device take turns, so each gets the device's whole share.
    """
    cores = len(os.sched_getaffinity(0))
    return spec.resources.threads_per_device or max(1, cores // derived.devices_per_node(spec))
