"""A repair of vLLM 0.23 on CPU that an engine needs before it loads a model."""

from __future__ import annotations


def repair_moe_activation() -> None:
    """Make MoE models run on x86 CPUs without AVX-512; nothing on other devices.

    `vllm/model_executor/layers/fused_moe/cpu_fused_moe.py` builds a `SiluAndMul` inside the forward pass of its
    portable path, and that fails: "Current vLLM config is not set". Its `forward_native` needs no object.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import _CPU_MOE_ACT_FN

    _CPU_MOE_ACT_FN[MoEActivation.SILU] = SiluAndMul.forward_native
