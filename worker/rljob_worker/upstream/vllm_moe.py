"""MoE models of the engine on x86 CPUs without AVX-512."""

from __future__ import annotations

from rljob_worker.upstream.patch import VLLM, Patch, Process


def _repair_activation() -> None:
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import _CPU_MOE_ACT_FN

    _CPU_MOE_ACT_FN[MoEActivation.SILU] = SiluAndMul.forward_native


PATCHES = (
    Patch(
        "vllm-moe-activation",
        ("vllm.model_executor.layers.fused_moe.cpu_fused_moe._CPU_MOE_ACT_FN",),
        {"vllm": VLLM},
        'the portable path builds a SiluAndMul inside the forward pass, which fails: "Current vLLM config is not set"; '
        "its forward_native needs no object",
        "tests/worker/upstream/test_patches.py::test_the_moe_activation_needs_no_object",
        _repair_activation,
        (Process.ENGINE_WORKER,),
        ("cpu",),
    ),
)
