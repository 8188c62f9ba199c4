"""Names by which a job's settings choose patches; here they cost no import of torch."""

from __future__ import annotations

CPU_KERNELS = "rljob_cpu"
"""Provider of `vllm_norms`, for the engine argument `ir_op_priority`."""
TORCH_LINEAR = "RLJOB_TORCH_LINEAR"
"""Variable of the engine's processes that installs `vllm_linear`."""
