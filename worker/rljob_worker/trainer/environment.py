"""Variables that a trainer process needs before Python starts."""

from __future__ import annotations

from rljob_api import derived
from rljob_api.spec import RLJobSpec, TrainingBackend
from rljob_worker.host.threads import threads_per_process

_OF_BACKEND = {
    # Its tensor parallelism counts on the order of work that one queue gives; that would hinder a backend which gathers
    # parameters while it computes.
    TrainingBackend.MEGATRON: {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
}


def trainer_environment(spec: RLJobSpec) -> dict[str, str]:
    """Environment variables of a trainer actor."""
    return {
        # Ray sets 1 for actors that ask for no CPUs. Trainer and engine take turns: each gets the device's whole share.
        "OMP_NUM_THREADS": str(
            threads_per_process(spec.resources.threads_per_device, derived.node_groups(spec)[0].devices)
        ),
        # Megatron compiles small helpers at first use: seconds at start-up, and nothing gained on CPU.
        "TORCHDYNAMO_DISABLE": "1",
        **_OF_BACKEND.get(spec.training.backend, {}),
    }
