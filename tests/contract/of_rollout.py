"""Contracts of vLLM on devices: vllm-ascend, and what vLLM itself has for devices alone."""

from __future__ import annotations

from contracts import Contract, Kind, Source

_PLATFORMS, _SLEEP, _EXTENSION = "engine/platforms.py", "engine/sleep_controller.py", "engine/device_extension.py"
_PATCH = "upstream/vllm_device.py"
_DRAW = "upstream/vllm_sampler.py"
_ENGINE, _ARGUMENTS = "vllm/v1/engine/llm_engine.py", "vllm/engine/arg_utils.py"
_GPU_WORKER, _GPU_RUNNER = "vllm/v1/worker/gpu_worker.py", "vllm/v1/worker/gpu_model_runner.py"
_SAMPLER, _TOP_K = "vllm/v1/sample/sampler.py", "vllm/v1/sample/ops/topk_topp_sampler.py"
_NPU_WORKER, _NPU_RUNNER = "vllm_ascend/worker/worker.py", "vllm_ascend/worker/model_runner_v1.py"
_NPU_SAMPLER, _NPU_CONFIG = "vllm_ascend/sample/sampler.py", "vllm_ascend/ascend_config.py"
_RELOAD, _FUSED_MOE = "weightsync/vllm_module.py", "vllm_ascend/ops/fused_moe/fused_moe.py"
_NPU_PLATFORM, _LOADER = "vllm_ascend/platform.py", "vllm_ascend/device_allocator/camem.py"

_GRAPHS, _CUDA_GRAPH, _ACL_GRAPH = (
    "upstream/vllm_graphs.py",
    "vllm/compilation/cuda_graph.py",
    "vllm_ascend/compilation/acl_graph.py",
)

_MODE = "logprobs_mode"


def _vllm(kind: Kind, name: str, file: str, used_in: str, why: str, *parameters: str, spelled: str = "") -> Contract:
    return Contract(Source.VLLM, kind, name, file, used_in, why, parameters, spelled=spelled)


def _ascend(
    kind: Kind,
    name: str,
    file: str,
    used_in: str,
    why: str,
    *parameters: str,
    spelled: str = "",
    executed: bool = True,
) -> Contract:
    return Contract(Source.VLLM_ASCEND, kind, name, file, used_in, why, parameters, spelled=spelled, executed=executed)


_TAGS = tuple(
    Contract(
        source,
        Kind.TEXT,
        f'tag="{tag}"',
        file,
        _SLEEP,
        f"what wakes as `{tag}`",
        spelled=f'tags=["{tag}"]',
        executed=source is Source.VLLM_ASCEND,
    )
    for source, file in ((Source.VLLM, _GPU_WORKER), (Source.VLLM_ASCEND, _NPU_WORKER))
    for tag in ("weights", "kv_cache")
)

_VLLM = (
    _vllm(Kind.FUNCTION, "LLMEngine.sleep", _ENGINE, _SLEEP, "level 2 keeps nothing", "level"),
    _vllm(Kind.FUNCTION, "LLMEngine.wake_up", _ENGINE, _SLEEP, "maps memory again, by tag", "tags"),
    *(
        _vllm(Kind.ATTRIBUTE, f"EngineArgs.{name}", _ARGUMENTS, _PLATFORMS, why)
        for name, why in (
            ("enable_sleep_mode", "weights and KV cache in pools of their own"),
            ("gpu_memory_utilization", "share of the device that must be free at the start"),
            ("kv_cache_memory_bytes", "size of the KV cache"),
            ("worker_extension_cls", "mixed into the worker's class"),
            ("additional_config", "vllm-ascend's settings"),
        )
    ),
    _vllm(Kind.FUNCTION, "Worker.sleep", _GPU_WORKER, _SLEEP, "the worker's part", "level"),
    _vllm(Kind.FUNCTION, "Worker.wake_up", _GPU_WORKER, _SLEEP, "the worker's part", "tags"),
    _vllm(Kind.ATTRIBUTE, "Worker.device", _GPU_WORKER, _EXTENSION, "the worker's device"),
    _vllm(Kind.ATTRIBUTE, "Worker.model_runner", _GPU_WORKER, _EXTENSION, "has model, sampler and KV cache"),
    *(
        _vllm(Kind.ATTRIBUTE, f"GPUModelRunner.{name}", _GPU_RUNNER, file, why)
        for name, file, why in (
            ("model", _EXTENSION, "its parameters and buffers"),
            ("model_config", _PATCH, "has the log-probabilities that were asked for"),
            ("sampler", _PATCH, "returns log-probabilities"),
            ("kv_caches", "engine/worker_extension.py", "tensors of the KV cache"),
            ("input_batch", _DRAW, "which request each row is, and its length"),
            ("requests", _DRAW, "sampling parameters, with the seed among them"),
        )
    ),
    _vllm(
        Kind.ATTRIBUTE,
        "CUDAGraphWrapper.concrete_cudagraph_entries",
        _CUDA_GRAPH,
        _GRAPHS,
        "graphs by the step that they are for",
    ),
    _vllm(Kind.FUNCTION, "CUDAGraphWrapper.unwrap", _CUDA_GRAPH, _GRAPHS, "the model itself"),
    _vllm(Kind.ATTRIBUTE, "CUDAGraphEntry.cudagraph", _CUDA_GRAPH, _GRAPHS, "None until it is captured"),
    _vllm(Kind.ATTRIBUTE, "EngineArgs.compilation_config", _ARGUMENTS, "engine/graphs.py", "what is captured"),
    _vllm(
        Kind.TEXT,
        "FULL_DECODE_ONLY = (FULL, NONE)",
        "vllm/config/compilation.py",
        "engine/graphs.py",
        "whole steps of one token a sequence; prompts run without",
        spelled="FULL_DECODE_ONLY",
    ),
    _vllm(Kind.ATTRIBUTE, "Sampler.topk_topp_sampler", _SAMPLER, _PATCH, "truncates and draws"),
    _vllm(
        Kind.TEXT,
        "random_sampled, processed_logprobs = self.topk_topp_sampler(",
        _SAMPLER,
        _DRAW,
        "called with logits, generators, top-k and top-p",
        spelled="topk_topp_sampler",
    ),
    _vllm(Kind.ATTRIBUTE, "Sampler.logprobs_mode", _SAMPLER, _PATCH, "which log-probabilities it returns"),
    _vllm(Kind.ATTRIBUTE, "TopKTopPSampler.logprobs_mode", _TOP_K, _PATCH, "the same, after truncation"),
    _vllm(
        Kind.TEXT,
        "assert not hasattr(worker_class, attr)",
        "vllm/v1/worker/worker_base.py",
        _EXTENSION,
        "an extension may not have a name that the worker has",
        spelled="class DeviceWorkerExtension",
    ),
    *(
        _vllm(Kind.TEXT, name, "vllm/envs.py", file, why)
        for name, file, why in (
            ("VLLM_SERVER_DEV_MODE", "roles.py", "endpoints for sleeping, for tools that users attach"),
            ("VLLM_ENABLE_V1_MULTIPROCESSING", "engine/environment.py", "the engine core inside the actor"),
            ("VLLM_WORKER_MULTIPROC_METHOD", "engine/environment.py", "a device cannot be used after a fork"),
            ("VLLM_USE_V2_MODEL_RUNNER", "rules/devices.py", "the model runner that the patches are not for"),
            ("VLLM_USE_FLASHINFER_SAMPLER", "engine/platforms.py", "another sampler, whose place ours takes"),
        )
    ),
)

_ASCEND = (
    _ascend(Kind.FUNCTION, "NPUWorker.sleep", _NPU_WORKER, _SLEEP, "the worker's part", "level"),
    _ascend(Kind.FUNCTION, "NPUWorker.wake_up", _NPU_WORKER, _SLEEP, "the worker's part", "tags"),
    _ascend(
        Kind.TEXT,
        'parallel_config.worker_cls = "vllm_ascend.worker.worker.NPUWorker"',
        _NPU_PLATFORM,
        _EXTENSION,
        "the class that the extension is mixed into",
        spelled="class DeviceWorkerExtension",
    ),
    _ascend(Kind.ATTRIBUTE, "NPUWorker.device", _NPU_WORKER, _EXTENSION, "the worker's device"),
    _ascend(Kind.ATTRIBUTE, "NPUWorker.model_runner", _NPU_WORKER, _EXTENSION, "as in vLLM"),
    _ascend(
        Kind.TEXT,
        "class NPUModelRunner(GPUModelRunner)",
        _NPU_RUNNER,
        _EXTENSION,
        "so it has what vLLM's has",
        spelled="model_runner",
    ),
    _ascend(Kind.ATTRIBUTE, "NPUModelRunner.sampler", _NPU_RUNNER, _PATCH, "its own sampler"),
    _ascend(
        Kind.TEXT,
        "self.sampler = AscendSampler()",
        _NPU_RUNNER,
        _PATCH,
        "made without the log-probabilities that were asked for: `rljob_prepare` can go when this changes",
        spelled=_MODE,
    ),
    _ascend(Kind.FUNCTION, "AscendSampler", _NPU_SAMPLER, _PATCH, "takes them", "logprobs_mode", spelled=_MODE),
    _ascend(Kind.ATTRIBUTE, "AscendSampler.topk_topp_sampler", _NPU_SAMPLER, _PATCH, "truncates and draws"),
    _ascend(
        Kind.ATTRIBUTE,
        "AscendTopKTopPSampler.apply_top_k_top_p",
        _NPU_SAMPLER,
        _DRAW,
        "truncates with the device's own kernel",
    ),
    _ascend(
        Kind.TEXT,
        'self.logprobs_mode == "processed_logprobs"',
        _NPU_SAMPLER,
        _PATCH,
        "read anew at each draw, by the part that truncates",
        spelled=_MODE,
    ),
    _ascend(
        Kind.TEXT,
        "w13_data = param.transpose(1, 2)",
        _NPU_WORKER,
        _EXTENSION,
        "waking replaces experts' weights by views: `rljob_restore_parameters` can go when this changes",
        spelled="rljob_restore_parameters",
    ),
    _ascend(
        Kind.TEXT,
        "FRACTAL_NZ mode is enabled",
        _NPU_WORKER,
        _PLATFORMS,
        "waking fails with it",
        spelled="_NZ_OFF",
        executed=False,
    ),
    _ascend(
        Kind.TEXT,
        "layer.weight.data = maybe_trans_nz(layer.weight.data)",
        "vllm_ascend/ops/linear.py",
        _RELOAD,
        "nothing with NZ off: dense layers keep the checkpoint's layout and take weights in place",
        spelled="same_layout",
    ),
    _ascend(
        Kind.TEXT,
        "w13_data = self._maybe_pad_weight(layer.w13_weight.data).transpose(1, 2).contiguous()",
        _FUSED_MOE,
        _RELOAD,
        "experts have a layout of their own, so they are loaded beside and repacked",
        spelled="same_layout",
    ),
    _ascend(Kind.ATTRIBUTE, "AscendConfig.weight_nz_mode", _NPU_CONFIG, _PLATFORMS, "layout of weights; 0 is plain"),
    _ascend(Kind.ATTRIBUTE, "AscendConfig.enable_fused_mc2", _NPU_CONFIG, "rules/devices.py", "forces the NZ layout"),
    _ascend(
        Kind.ATTRIBUTE,
        "ACLGraphWrapper.concrete_aclgraph_entries",
        _ACL_GRAPH,
        _GRAPHS,
        "graphs by the step that they are for",
        executed=False,
    ),
    _ascend(Kind.FUNCTION, "ACLGraphWrapper.unwrap", _ACL_GRAPH, _GRAPHS, "the model itself", executed=False),
    _ascend(
        Kind.ATTRIBUTE,
        "ACLGraphEntry.aclgraph",
        _ACL_GRAPH,
        _GRAPHS,
        "None until it is captured",
        executed=False,
    ),
    _ascend(
        Kind.FUNCTION,
        "NPUModelRunner._use_aclgraph",
        _NPU_RUNNER,
        _PLATFORMS,
        "captures only what vLLM compiles, so compilation is on",
    ),
    _ascend(
        Kind.TEXT,
        "enable_npugraph_ex: bool = True",
        _NPU_CONFIG,
        _PLATFORMS,
        "the backend that rewrites operators; off",
        spelled="enable_npugraph_ex",
    ),
    _ascend(
        Kind.ATTRIBUTE,
        "AscendConfig.enable_sleep_mode_extra_cleanup",
        _NPU_CONFIG,
        "rules/devices.py",
        "drops graphs and HCCL groups at each sleep",
    ),
    _ascend(
        Kind.TEXT,
        'os.environ.get("ASCEND_LAUNCH_BLOCKING", "0") == "1"',
        _NPU_PLATFORM,
        "rules/devices.py",
        "refuses graphs",
        spelled="ASCEND_LAUNCH_BLOCKING",
    ),
    _ascend(
        Kind.TEXT,
        "if self.init_snapshot.free_memory < self.requested_memory:",
        _NPU_WORKER,
        _PLATFORMS,
        "also when the KV cache has a size",
        spelled="gpu_memory_utilization",
    ),
    _ascend(
        Kind.TEXT,
        '"expandable_segments:True" not in conf',
        _LOADER,
        "roles.py",
        "its sleep does not work on them",
        spelled="expandable_segments:False",
    ),
)

CONTRACTS = (*_TAGS, *_VLLM, *_ASCEND)
