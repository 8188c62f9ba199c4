"""What a trainer process needs in its environment before Python starts."""

from __future__ import annotations

from rljob_api.spec import RLJobSpec
from rljob_worker.threads import threads_per_process


def trainer_environment(spec: RLJobSpec) -> dict[str, str]:
    """Environment variables of a trainer actor."""
    return {
        # Ray sets 1 for actors that ask for no CPUs.
        "OMP_NUM_THREADS": str(threads_per_process(spec)),
        # Megatron compiles small helpers at first use: seconds at start-up, and nothing gained on CPU.
        "TORCHDYNAMO_DISABLE": "1",
        # Megatron's tensor parallelism counts on the order of work that one queue gives.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
