"""Linear layers of the engine on CPU by torch's packed products."""

from __future__ import annotations

import torch

from rljob_worker.devices import packed_linear
from rljob_worker.upstream.patch import TORCH, VLLM, Patch, Process
from rljob_worker.upstream.switches import TORCH_LINEAR


def _use_torch() -> None:
    """Have vLLM pack and multiply with torch's oneDNN operators in the place of its own ones from now on."""
    import vllm._custom_ops as ops

    of_earlier_models = ops.onednn_mm

    def pack(weight: torch.Tensor, primitive_cache_size: int = 0) -> torch.Tensor:
        return packed_linear.pack(weight.t())

    def multiply(
        packed: torch.Tensor | ops.CPUDNNLGEMMHandler, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if not isinstance(packed, torch.Tensor):
            return of_earlier_models(packed, x, bias)
        return packed_linear.multiply(packed, x, bias)

    ops.create_onednn_mm, ops.onednn_mm = pack, multiply  # type: ignore[assignment]


PATCHES = (
    Patch(
        "vllm-torch-linear",
        ("vllm._custom_ops.create_onednn_mm", "vllm._custom_ops.onednn_mm"),
        {"vllm": VLLM, "torch": TORCH},
        "for a decoding step of 64 rows of fp32, torch's packed products take two thirds of the time of vLLM's own",
        "tests/worker/upstream/test_patches.py::test_torch_multiplies_for_vllm",
        _use_torch,
        (Process.ENGINE_WORKER,),
        ("cpu",),
        variable=TORCH_LINEAR,
    ),
)
