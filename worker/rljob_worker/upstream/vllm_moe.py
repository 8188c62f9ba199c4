"""MoE models of the engine on CPUs: those without AVX-512, and which experts a token went to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from rljob_worker.upstream.patch import VLLM, Patch, Process, put


def _repair_activation() -> None:
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import _CPU_MOE_ACT_FN

    _CPU_MOE_ACT_FN[MoEActivation.SILU] = SiluAndMul.forward_native


def _tell_experts() -> None:
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    computed, select = MoERunner._apply_quant_method, cpu_fused_moe.select_experts
    listening: list[Callable[[Tensor], None]] = []

    @functools.wraps(computed)
    def compute(runner: MoERunner, *args: Any, **kwargs: Any) -> object:
        listener = getattr(runner.router, "capture_fn", None)
        if listener is None:
            return computed(runner, *args, **kwargs)
        listening.append(listener)
        try:
            return computed(runner, *args, **kwargs)
        finally:
            listening.pop()

    @functools.wraps(select)
    def select_and_tell(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        weights, experts = select(*args, **kwargs)
        if listening:
            listening[-1](experts)
        return weights, experts

    put(MoERunner, _apply_quant_method=compute)
    put(cpu_fused_moe, select_experts=select_and_tell)


_MOE = "vllm.model_executor.layers.fused_moe"
PATCHES = (
    Patch(
        "vllm-moe-activation",
        (f"{_MOE}.cpu_fused_moe._CPU_MOE_ACT_FN",),
        {"vllm": VLLM},
        'the portable path builds a SiluAndMul inside the forward pass, which fails: "Current vLLM config is not set"; '
        "its forward_native needs no object",
        "tests/worker/upstream/test_patches.py::test_the_moe_activation_needs_no_object",
        _repair_activation,
        (Process.ENGINE_WORKER,),
        ("cpu",),
    ),
    Patch(
        "vllm-moe-experts-told",
        (f"{_MOE}.runner.moe_runner.MoERunner._apply_quant_method", f"{_MOE}.cpu_fused_moe.select_experts"),
        {"vllm": VLLM},
        "experts are chosen inside the CPU's product, past the router that tells them: enable_return_routed_experts "
        "returns zeros without a word",
        "tests/worker/engine/test_returned_experts.py::test_experts_are_those_of_transformers_router",
        _tell_experts,
        (Process.ENGINE_WORKER,),
        ("cpu",),
    ),
)
