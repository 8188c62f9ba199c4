"""What a trainer process needs in its environment before Python starts."""

from __future__ import annotations

import os

from rljob_api.spec import RLJobSpec


def trainer_environment(spec: RLJobSpec) -> dict[str, str]:
    """Environment variables of a trainer actor."""
    devices = spec.resources.devices_per_node
    threads = spec.resources.threads_per_device or max(1, (os.cpu_count() or 1) // devices)
    return {
        # Ray sets 1 for actors that ask for no CPUs.
        "OMP_NUM_THREADS": str(threads),
        # Megatron compiles small helpers at first use: seconds at start-up, and nothing gained on CPU.
        "TORCHDYNAMO_DISABLE": "1",
    }
