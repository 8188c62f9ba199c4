"""Runs on an NVIDIA H200 (docs/ascend-status.md): 200 steps of the quickstart, `device_switch.py` in both modes."""

from __future__ import annotations

from contracts import Contract, Source

_ALL_OF = {Source.UPSTREAM_SAVER, Source.VLLM, Source.MEGATRON, Source.TORCH}
_OF_RAY = {'return "GPU"', "CUDA_VISIBLE_DEVICES"}
_NOT = {
    "EngineArgs.additional_config",
    "VLLM_SERVER_DEV_MODE",
    "from apex.optimizers import FusedAdam as Adam",
    # Nothing was resumed.
    "cuda.random.set_rng_state",
    # No state was offloaded.
    "cuda.current_stream",
    "cuda.Stream",
    "cuda.stream",
    "streams.Stream.wait_stream",
    "streams.Stream.record_event",
    "streams.Stream.synchronize",
    "streams.Event.wait",
}


def ran_on_gpu(contract: Contract) -> bool:
    """Whether a run there went through what the contract names."""
    if contract.source is Source.RAY:
        return contract.name in _OF_RAY
    return contract.source in _ALL_OF and contract.name not in _NOT
