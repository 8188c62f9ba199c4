"""Names by which a job's settings choose patches; here they cost no import of torch."""

from __future__ import annotations

CPU_KERNELS = "rljob_cpu"
"""Provider of `vllm_norms`, for the engine argument `ir_op_priority`."""
TORCH_LINEAR = "RLJOB_TORCH_LINEAR"
"""Variable of the engine's processes that installs `vllm_linear`."""
SEED = "rljob_seed"
"""Key of a request's seed in vLLM's `SamplingParams.extra_args`, for `vllm_sampler`. With vLLM's own `seed` a request
has a generator, which starts anew where the request is submitted again, and which vLLM 0.23 fails to put back on CPU
where a prompt is computed in parts."""
