"""RMSNorm of the engine on CPU by vLLM's own C++ kernels, which it uses on CUDA alone: a sixth of the time.

They are registered with vLLM, and the engine's arguments choose them. In bfloat16, where they round once less than the
model's definition, they do not apply.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_worker.upstream.patch import VLLM, Patch, Process
from rljob_worker.upstream.switches import CPU_KERNELS

_LANES = 16


def _fits_one(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return (
        variance_size is None
        and weight is not None
        and x.dtype == weight.dtype == torch.float32
        and x.shape[-1] % _LANES == 0
    )


def _fits_sum(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _fits_one(x, weight, epsilon, variance_size) and x.is_contiguous() and x_residual.is_contiguous()


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    out = torch.empty(x.shape)
    torch.ops._C.rms_norm(out, x.contiguous(), weight, epsilon)
    return out


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def _register() -> None:
    from vllm.ir import ops

    ops.rms_norm.register_impl(CPU_KERNELS, supports_args=_fits_one)(_rms_norm)
    ops.fused_add_rms_norm.register_impl(CPU_KERNELS, supports_args=_fits_sum, inplace=True)(_fused_add_rms_norm)


_OPS = ("rms_norm", "fused_add_rms_norm")
PATCHES = (
    Patch(
        "vllm-norms-on-cpu",
        tuple(
            f"vllm.ir.ops.{file}{op}.impls" for file in ("", "layernorm.") for op in ("rms_norm", "fused_add_rms_norm")
        ),
        {"vllm": VLLM},
        "vLLM uses its own C++ norms on CUDA alone: on CPU they take a sixth of the time",
        "tests/worker/upstream/test_vllm_norms.py::test_they_are_chosen_for_float32_and_agree_with_the_definition",
        _register,
        (Process.ENGINE, Process.ENGINE_WORKER),
        ("cpu",),
    ),
)
