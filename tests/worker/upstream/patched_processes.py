"""Facts of a process with all patches of its role; `changes.py` calls each function in a fork of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rljob_worker.upstream.install import install
from rljob_worker.upstream.patch import Process
from rljob_worker.upstream.switches import TORCH_LINEAR


def trainer() -> dict[str, Any]:
    """Devices of tensors, random numbers, and memory that exchanges between a rank and itself take."""
    for _ in range(2):
        install(Process.TRAINER, "cpu", "Megatron")
    import torch
    import torch.distributed as dist
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with torch.cuda.stream(torch.cuda.Stream()):
        made = [getattr(torch, name)(2, device="cuda") for name in ("tensor", "zeros", "ones", "empty")]
    made.append(torch.full((2,), 1.0, device="cuda:0"))
    tracker = get_cuda_rng_tracker()
    tracker.add("one", 5)
    outside = torch.get_rng_state()
    with tracker.fork("one"):
        first = torch.rand(3)
    untouched = torch.equal(torch.get_rng_state(), outside)
    with tracker.fork("one"):
        second = torch.rand(3)
    both = torch.rand(6, generator=torch.Generator().manual_seed(5))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def taken(exchange: Callable[..., Any]) -> float:
        """MiB."""
        buffer = torch.ones(16 << 20)
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        exchange(buffer[:], buffer, group=dist.group.WORLD)
        return (_resident("VmHWM") - before) / 2**10

    apart = torch.zeros(3)
    buffers.dist_all_gather_func(apart, torch.arange(3.0), group=dist.group.WORLD)
    return {
        "taken_mib": [taken(buffers.dist_reduce_scatter_func), taken(buffers.dist_all_gather_func)],
        "apart": apart.tolist(),
        "devices": [tensor.device.type for tensor in made],
        "current": torch.cuda.current_device(),
        "type": made[1].type(),
        "moved": made[1].cuda().device.type,
        "drawn": torch.equal(torch.cat([first, second]), both),
        "untouched": untouched,
    }


def _resident(name: str) -> int:
    """KiB."""
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])


def engine_worker() -> dict[str, Any]:
    """Products and activations of vLLM's, with and without the variable that asks for torch's product."""
    import torch
    import vllm._custom_ops as ops

    own = ops.onednn_mm
    os.environ[TORCH_LINEAR] = "0"
    install(Process.ENGINE_WORKER, "cpu")
    replaced_unasked = ops.onednn_mm is not own
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import _CPU_MOE_ACT_FN

    x, weight, bias = torch.randn(64, 32), torch.randn(48, 32), torch.randn(48)
    gate, up = x.chunk(2, -1)
    activated = _CPU_MOE_ACT_FN[MoEActivation.SILU](x)
    os.environ[TORCH_LINEAR] = "1"
    for _ in range(2):
        install(Process.ENGINE_WORKER, "cpu")
    product = ops.onednn_mm(ops.create_onednn_mm(weight.t(), 8), x, bias)
    return {
        "replaced": [replaced_unasked, ops.onednn_mm is not own],
        "close": torch.allclose(product, torch.nn.functional.linear(x, weight, bias), atol=1e-4),
        "activated": torch.allclose(activated, torch.nn.functional.silu(gate) * up, atol=1e-6),
    }
