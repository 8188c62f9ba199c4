"""What megatron-core 0.16 needs on CUDA: nothing before it is imported, and the seeds of its generators."""

from __future__ import annotations

import warnings


def install() -> None:
    """Quieten what Megatron says about libraries that are not used here."""
    for missing in ("Apex is not installed", "Transformer Engine and Apex are not installed"):
        warnings.filterwarnings("ignore", message=missing, category=UserWarning)


def finish(seed: int) -> None:
    """Seed Megatron's generators on the device; call after `initialize_model_parallel`."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed)
