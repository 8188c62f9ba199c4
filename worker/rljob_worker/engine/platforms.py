"""Differences in vLLM between kinds of devices; code elsewhere never asks for the kind."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rljob_api.rules.model_config import CPU_HEAD_SIZES
from rljob_api.spec import Precision, RLJobSpec
from rljob_worker.engine.cpu_libraries import check_cpu_libraries
from rljob_worker.engine.graphs import graph_arguments
from rljob_worker.errors import UserError
from rljob_worker.models.facts import ModelFacts
from rljob_worker.upstream.switches import CPU_KERNELS, TORCH_LINEAR

if TYPE_CHECKING:
    from rljob_worker.engine.sleep_controller import SleepController

MERGED = {"additional_config", "compilation_config"}
"""Arguments that a platform makes of its own values and the user's."""
CPU_KV_CACHE_BYTES = 2**30
_NZ_OFF = {"weight_nz_mode": 0}
_REWRITES = ("enable_npugraph_ex", "fuse_norm_quant", "fuse_qknorm_rope", "fuse_allreduce_rms", "fuse_muls_add")
"""Settings by which vllm-ascend replaces operators of what it compiles."""
_CAPTURE_ALONE, _COMPILE = 0, 3
"""vLLM's `CompilationMode`: NONE and VLLM_COMPILE."""


@dataclass(frozen=True, slots=True)
class EnginePlatform:
    """vLLM on one kind of device."""

    arguments: Callable[[RLJobSpec], dict[str, object]]
    """Engine arguments beside those that all kinds have."""
    environment: Callable[[RLJobSpec], dict[str, str]]
    """Variables beside those that all kinds have."""
    sleep_controller: Callable[[], type[SleepController]]
    """Class of the sleep controller; called after `prepare`."""
    check_model: Callable[[RLJobSpec, ModelFacts], None]
    """Refuses a model that trains here but that the engine cannot generate with; UserError."""
    prepare: Callable[[], None]
    """Called in the engine's process before vLLM is imported."""
    graphs: Callable[[RLJobSpec], dict[str, object]]
    """Engine arguments of `rollout.graphMode`, over the others."""


def engine_platform(kind: str) -> EnginePlatform:
    """vLLM on devices of `kind` (`DeviceKind.name`)."""
    return _PLATFORMS[kind]


def _cpu_arguments(spec: RLJobSpec) -> dict[str, object]:
    return {
        "kv_cache_memory_bytes": spec.rollout.kv_cache_bytes or CPU_KV_CACHE_BYTES,
        "worker_extension_cls": "rljob_worker.engine.worker_extension.CpuWorkerExtension",
        "ir_op_priority": {op: [CPU_KERNELS, "native"] for op in ("rms_norm", "fused_add_rms_norm")},
    }


def _cpu_sleep_controller() -> type[SleepController]:
    from rljob_worker.engine.sleep_controller import CpuSleepController

    return CpuSleepController


def _cpu_environment(spec: RLJobSpec) -> dict[str, str]:
    environment = {
        # vLLM would pin its threads to cores of its own choice: engines side by side would all take the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Eager mode compiles helpers all the same: 11 to 22 s at start-up for bit-equal results.
        "TORCHDYNAMO_DISABLE": "0" if spec.rollout.graph_mode else "1",
    }
    if platform.machine() == "x86_64" and not spec.rollout.graph_mode:
        # For a decoding step of 64 rows of fp32, torch's packed products take two thirds of the time of vLLM's own, and
        # as long for a few; in bf16 they take as long. New weights can be written into their memory, where vLLM's own
        # are packed into new memory, which takes five times as long. The compiler cannot read the packed weights.
        environment[TORCH_LINEAR] = "1"
    return environment


def _check_cpu_model(spec: RLJobSpec, model: ModelFacts) -> None:
    if model.head_dim not in CPU_HEAD_SIZES:
        allowed = ", ".join(map(str, CPU_HEAD_SIZES))
        raise UserError(
            f"spec.model: head_dim {model.head_dim} is not supported by vLLM's attention on CPU; allowed: {allowed}"
        )
    linear = model.linear_attention
    if linear is None:
        return
    if spec.training.precision is not Precision.BF16:
        raise UserError("spec.training.precision: vLLM's linear attention on CPU computes in bf16 alone; use 'bf16'")
    heads = {"linear_key_head_dim": linear.key_head_dim, "linear_value_head_dim": linear.value_head_dim}
    for name, size in heads.items():
        if size % 32:
            raise UserError(
                f"spec.model: {name} {size} is not supported by vLLM's linear attention on CPU; use a multiple of 32"
            )


def _device_arguments(spec: RLJobSpec) -> dict[str, object]:
    arguments: dict[str, object] = {
        "enable_sleep_mode": True,
        # vLLM's default is on off the CPU: one batch may then be in flight across a sleep (rljob_api.rules.devices).
        "async_scheduling": False,
        # Also with a size for the KV cache: vLLM does not start unless this share of the device is free.
        "gpu_memory_utilization": spec.rollout.memory_fraction,
        "worker_extension_cls": "rljob_worker.engine.device_extension.DeviceWorkerExtension",
    }
    if spec.rollout.kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = spec.rollout.kv_cache_bytes
    return arguments


def _device_sleep_controller() -> type[SleepController]:
    from rljob_worker.engine.sleep_controller import DeviceSleepController

    return DeviceSleepController


def _npu_arguments(spec: RLJobSpec) -> dict[str, object]:
    """Weights in the NZ layout cannot be updated in place: vllm-ascend refuses to wake with it."""
    given = spec.rollout.engine_args.get("additional_config", {})
    assert isinstance(given, dict)  # rljob_api.rules.devices has looked at it
    return _device_arguments(spec) | {"additional_config": given | _NZ_OFF}


def _cuda_graphs(spec: RLJobSpec) -> dict[str, object]:
    """The kernels that run without graphs, captured: nothing is compiled, and rounding stays."""
    return graph_arguments(spec, _CAPTURE_ALONE)


def _npu_graphs(spec: RLJobSpec) -> dict[str, object]:
    """vllm-ascend 0.23 captures only what vLLM compiles (`NPUModelRunner._use_aclgraph`); without its `npugraph_ex` and
    its fusions the compiled model has the operators that run without graphs."""
    given = _npu_arguments(spec)["additional_config"]
    assert isinstance(given, dict)
    own = dict.fromkeys(_REWRITES, False) | (given.get("ascend_compilation_config") or {})
    return graph_arguments(spec, _COMPILE) | {"additional_config": given | {"ascend_compilation_config": own}}


def _compiled_alone(_spec: RLJobSpec) -> dict[str, object]:
    """vLLM compiles the model on CPU; there is nothing to capture."""
    return {}


def _npu_environment(spec: RLJobSpec) -> dict[str, str]:
    """vLLM compiles ahead of time from torch 2.10 on, whose cache takes no module of vllm-ascend's compiler: the engine
    would end with `expected OutputCode`."""
    return {"VLLM_USE_AOT_COMPILE": "0"} if spec.rollout.graph_mode else {}


def _cuda_environment(_spec: RLJobSpec) -> dict[str, str]:
    """FlashInfer would draw tokens, whose place RLJob's own drawing takes (`upstream.vllm_sampler`)."""
    return {"VLLM_USE_FLASHINFER_SAMPLER": "0"}


def _any_model(_spec: RLJobSpec, _model: ModelFacts) -> None: ...


def _check_npu_model(spec: RLJobSpec, model: ModelFacts) -> None:
    if spec.rollout.graph_mode and any(model.moe_layers):
        raise UserError(
            "spec.rollout.graphMode: vllm-ascend keeps experts in a layout of its own, into which each new version is "
            "packed; captured graphs of such modules were not tried: use false"
        )


def _nothing() -> None: ...


_PLATFORMS = {
    "cpu": EnginePlatform(
        _cpu_arguments,
        _cpu_environment,
        _cpu_sleep_controller,
        _check_cpu_model,
        check_cpu_libraries,
        _compiled_alone,
    ),
    "cuda": EnginePlatform(
        _device_arguments, _cuda_environment, _device_sleep_controller, _any_model, _nothing, _cuda_graphs
    ),
    "npu": EnginePlatform(
        _npu_arguments, _npu_environment, _device_sleep_controller, _check_npu_model, _nothing, _npu_graphs
    ),
}
