"""Seeds Megatron's generators, after `initialize_model_parallel`."""

from __future__ import annotations

import torch


def seed_cpu(seed: int) -> None:
    """Name the states of torch's CPU generator in Megatron's tracker (`upstream.megatron`).

    Seeds as in Megatron's `model_parallel_cuda_manual_seed`: tensor-parallel ranks differ, data-parallel ranks agree.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    expert_tensor_rank = parallel_state.get_expert_tensor_parallel_rank()
    tracker = random.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(random.get_data_parallel_rng_tracker_name(), seed)
    tracker.add(random._MODEL_PARALLEL_RNG_TRACKER_NAME, seed + 2718 + tensor_rank)
    tracker.add(random.get_expert_parallel_rng_tracker_name(), seed + 1024 + 100 * expert_rank + expert_tensor_rank)


def seed_device(seed: int) -> None:
    """Seed the generators on the device."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed)


def seed_npu(seed: int) -> None:
    """Seed the generators on the device, and check the optimizer that MindSpeed has chosen.

    Raises:
        RuntimeError: Megatron's optimizer is not torch's AdamW: MindSpeed was active before with other arguments.
    """
    from megatron.core import optimizer

    adam = optimizer.Adam
    if not issubclass(adam, torch.optim.AdamW):
        raise RuntimeError(
            f"Megatron uses {adam.__module__}.{adam.__qualname__} in the place of torch's AdamW, and a checkpoint "
            "would lose its count of updates: mindspeed was imported before rljob_worker.upstream activated it"
        )
    seed_device(seed)
