"""Contracts of the devices, the memory saver and the processes' environment."""

from __future__ import annotations

from contracts import Contract, Kind, Source

REBUILD_PARAMETERS = (
    "tensor_cls",
    "tensor_size",
    "tensor_stride",
    "tensor_offset",
    "storage_cls",
    "dtype",
    "storage_device",
    "storage_handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "requires_grad",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)
"""The values of an exported tensor, by position."""

_ACCELERATOR, _NPU, _CUDA = "devices/accelerator.py", "devices/npu.py", "devices/cuda.py"
_LIBRARY, _CHECKS, _IPC, _ROLES = "memory/saver_library.py", "memory/saver_checks.py", "devices/ipc.py", "roles.py"
_KINDS, _OVERLAP = "devices/kinds.py", "devices/overlap.py"


def _npu(name: str, file: str, why: str, *parameters: str, used_in: str = _ACCELERATOR) -> Contract:
    return Contract(Source.TORCH_NPU, Kind.FUNCTION, f"npu.{name}", file, used_in, why, parameters, executed=True)


def _npu_text(text: str, file: str, used_in: str, why: str, *, executed: bool = False) -> Contract:
    return Contract(Source.TORCH_NPU, Kind.TEXT, text, file, used_in, why, spelled=text, executed=executed)


def _profiler(name: str, file: str, spelled: str, *keywords: str) -> Contract:
    why = "profiles a step's training or generation"
    path = f"{_PROFILER}/{file}"
    return Contract(
        Source.TORCH_NPU, Kind.FUNCTION, f"profiler.{name}", path, _PROFILING, why, keywords=keywords, spelled=spelled
    )


_PROFILER, _PROFILING = "torch_npu/profiler", "devices/profiling.py"
_LIB = "torch_npu/lib/libtorch_npu.so"
_REGISTRY = "torch_npu/_init/registry/distributed.py"
_MEMORY, _INIT, _UTILS = "torch_npu/npu/memory.py", "torch_npu/npu/__init__.py", "torch_npu/npu/utils.py"

_STREAMS = "torch_npu/npu/streams.py"
_OF_STREAMS = (
    ("Stream.wait_stream", "copies begin after what was computed before", "stream"),
    ("Stream.record_event", "a place in a queue"),
    ("Stream.synchronize", "the host waits for what is queued"),
    ("Event.wait", "one queue waits for a place in the other", "stream"),
)

_TORCH_NPU = (
    _npu("device_count", _INIT, "how many devices the process sees"),
    _npu("set_device", _UTILS, "the device of this thread", "device"),
    _npu("get_device_properties", _INIT, "uuid, for the device's identity", "device_name"),
    _npu("mem_get_info", _INIT, "(free, total) bytes of the whole device", "device"),
    _npu("memory_reserved", _MEMORY, "bytes that torch's allocator holds", "device"),
    _npu("synchronize", _UTILS, "before memory is unmapped or freed", "device"),
    _npu("current_stream", _UTILS, "computes; copies of an offloaded state go beside it", "device", used_in=_OVERLAP),
    _npu("Stream", _STREAMS, "copies go through one of their own", used_in=_OVERLAP),
    _npu("stream", _UTILS, "work is queued on it", "stream", used_in=_OVERLAP),
    *(
        Contract(
            Source.TORCH_NPU,
            Kind.FUNCTION,
            f"streams.{name}",
            _STREAMS,
            _OVERLAP,
            why,
            tuple(parameters),
            executed=True,
        )
        for name, why, *parameters in _OF_STREAMS
    ),
    _npu("empty_cache", _MEMORY, "gives free blocks back before sleep"),
    _npu("host_empty_cache", _MEMORY, "gives cached pinned host memory back after sleep and export", used_in=_NPU),
    _npu("MemPool", _MEMORY, "memory that is never mixed with other memory", "allocator"),
    _npu("MemPoolContext", _MEMORY, "its allocator is asked", "pool", used_in=_NPU),
    _npu_text(
        "_npu_beginAllocateCurrentThreadToPool", _LIB, _NPU, "allocates from it, in this thread alone", executed=True
    ),
    _npu_text("_npu_endAllocateCurrentStreamToPool", _LIB, _NPU, "no more", executed=True),
    _npu(
        "set_per_process_memory_fraction",
        _MEMORY,
        "trainMemoryMargin stays free: torch raises before the memory saver would end the process",
        "fraction",
        "device",
    ),
    _npu(
        "NPUPluggableAllocator",
        _MEMORY,
        "torch mode: allocator over the memory saver's functions",
        "path_to_so_file",
        "alloc_fn_name",
        "free_fn_name",
        used_in=_NPU,
    ),
    Contract(
        Source.TORCH_NPU,
        Kind.FUNCTION,
        "multiprocessing.reductions.rebuild_npu_tensor",
        "torch_npu/multiprocessing/reductions.py",
        _NPU,
        "opens an exported tensor; the device is value 6 and is replaced by the importer's",
        REBUILD_PARAMETERS,
        executed=True,
    ),
    _npu_text("aclrtMallocAlign32", _LIB, _NPU, "what the allocator calls and the memory saver hooks", executed=True),
    _npu_text("PYTORCH_NPU_ALLOC_CONF", _LIB, _NPU, "allocator settings", executed=True),
    _npu_text("expandable_segments", _LIB, _CHECKS, "allocator setting that must not be True"),
    _profiler(
        "profile",
        "profiler.py",
        "profile(",
        "activities",
        "with_modules",
        "experimental_config",
        "on_trace_ready",
    ),
    _profiler("tensorboard_trace_handler", "profiler.py", "tensorboard_trace_handler", "dir_name", "analyse_flag"),
    _profiler(
        "_ExperimentalConfig.__init__", "experimental_config.py", "_ExperimentalConfig", "profiler_level", "export_type"
    ),
    _npu_text(
        "trace_view.json",
        f"{_PROFILER}/analysis/prof_common_func/_constant.py",
        _PROFILING,
        "the profile, as Chrome traces",
    ),
    _npu_text(
        "ProfilerLevel",
        f"{_PROFILER}/__init__.py",
        _PROFILING,
        "`Level1`: operators, their times on the device, and HCCL",
    ),
    _npu_text("ExportType", f"{_PROFILER}/__init__.py", _PROFILING, "`Text`: files of JSON"),
    _npu_text("ProfilerActivity", f"{_PROFILER}/__init__.py", _PROFILING, "`CPU` and `NPU`"),
    _npu_text("ASCEND_RT_VISIBLE_DEVICES", _INIT, _NPU, "devices that a process sees", executed=True),
    _npu_text(
        "ProcessGroupHCCL",
        _REGISTRY,
        _NPU,
        "a group for the broadcast, as `init_process_group` makes them",
        executed=True,
    ),
    _npu_text("is_high_priority_stream", _REGISTRY, _NPU, "an option of it", executed=True),
    _npu_text("global_ranks_in_group", _REGISTRY, _NPU, "an option of it: its members", executed=True),
    _npu_text("group_id", _REGISTRY, _NPU, "an option of it: its name", executed=True),
    _npu_text("HCCL_BUFFSIZE", _LIB, _ROLES, "MiB of each of a communicator's two buffers"),
    _npu_text("HCCL_CONNECT_TIMEOUT", _LIB, _ROLES, "seconds to connect"),
    _npu_text("HCCL_EXEC_TIMEOUT", _LIB, _ROLES, "seconds that a collective may take"),
    _npu_text("HCCL_DETERMINISTIC", _LIB, _ROLES, "reductions in a fixed order"),
    Contract(
        Source.TORCH_NPU,
        Kind.TEXT,
        "LD_PRELOAD detected, FunctionLoader prefers RTLD_DEFAULT",
        _LIB,
        _CHECKS,
        "without it the preloaded hook is never called",
        spelled="LD_PRELOAD",
        executed=True,
    ),
)

_C_FUNCTIONS = {
    "tms_set_interesting_region": ("whether this thread's allocations are tracked", ("bool",)),
    "tms_get_interesting_region": ("the same, read; returns bool", ()),
    "tms_set_current_tag": ("tag of this thread's allocations", ("const char *",)),
    "tms_set_enable_cpu_backup": ("whether the library keeps contents", ("bool",)),
    "tms_pause": ("unmaps all tracked memory; a second call ends the process", ("const char *",)),
    "tms_resume": ("maps it again", ("const char *",)),
}
_TORCH_MODE = {
    "tms_torch_malloc": ("torch mode: allocates", ("ssize_t", "int", "aclrtStream")),
    "tms_torch_free": ("torch mode: frees; outside of tracking it ends the process", ("void *", "ssize_t", "int")),
}
_PRELOAD_SO = "torch_memory_saver_hook_mode_preload_cu12.abi3.so"
_TORCH_SO = "torch_memory_saver_hook_mode_torch_cu12.abi3.so"
_ENTRY = "contrib/torch_memory_saver/csrc/entrypoint.cpp"

_SAVERS = (
    *(
        Contract(Source.UPSTREAM_SAVER, Kind.SYMBOL, name, _PRELOAD_SO, _LIBRARY, why, parameters)
        for name, (why, parameters) in _C_FUNCTIONS.items()
    ),
    *(
        Contract(Source.UPSTREAM_SAVER, Kind.SYMBOL, name, _TORCH_SO, _LIBRARY, why, parameters)
        for name, (why, parameters) in _TORCH_MODE.items()
    ),
    Contract(
        Source.UPSTREAM_SAVER,
        Kind.SYMBOL,
        "tms_get_cpu_backup_pointer",
        _PRELOAD_SO,
        _LIBRARY,
        "only upstream has it: tells the builds apart",
    ),
    Contract(Source.UPSTREAM_SAVER, Kind.SYMBOL, "cudaMalloc", _PRELOAD_SO, _CUDA, "what is hooked on CUDA"),
    Contract(
        Source.UPSTREAM_SAVER,
        Kind.FUNCTION,
        "utils.get_binary_path_from_package",
        "torch_memory_saver/utils.py",
        _LIBRARY,
        "finds the library for torch mode",
        ("stem",),
    ),
    *(
        Contract(Source.ASCEND_SAVER, Kind.RECORDED, name, _ENTRY, _LIBRARY, why, parameters)
        for name, (why, parameters) in {**_C_FUNCTIONS, **_TORCH_MODE}.items()
    ),
    Contract(
        Source.ASCEND_SAVER,
        Kind.RECORDED,
        "aclrtMallocAlign32",
        _ENTRY,
        _NPU,
        "what is hooked on NPUs, with aclrtFree",
        ("void **", "size_t", "aclrtMemMallocPolicy"),
    ),
    Contract(
        Source.ASCEND_SAVER,
        Kind.RECORDED,
        "aclrtFree",
        _ENTRY,
        _ACCELERATOR,
        "hooked too: frees tracked memory after waiting 3 s at most for the device",
        ("void *",),
        spelled="Ascend memory saver",
    ),
    Contract(
        Source.ASCEND_SAVER,
        Kind.RECORDED,
        "utils.get_binary_path_from_package",
        "contrib/torch_memory_saver/python/torch_memory_saver/utils.py",
        _LIBRARY,
        "finds the library for torch mode",
        ("stem",),
    ),
    *(
        Contract(Source.ASCEND_SAVER, Kind.RECORDED, name, file, used_in, why, spelled=name)
        for name, file, used_in, why in (
            ("TMS_INIT_ENABLE", _ENTRY, _CHECKS, "tracks every thread from the start"),
            ("TMS_INIT_ENABLE_CPU_BACKUP", _ENTRY, _CHECKS, "the library keeps contents by default"),
            (
                "TMS_HOOK_MODE",
                "contrib/torch_memory_saver/python/torch_memory_saver/entrypoint.py",
                _CHECKS,
                "mode of the Python package",
            ),
        )
    ),
)

_REDUCTIONS = "torch/multiprocessing/reductions.py"
_CUDA_MEMORY, _CUDA_INIT = "torch/cuda/memory.py", "torch/cuda/__init__.py"


def _torch(name: str, file: str, used_in: str, why: str, *parameters: str) -> Contract:
    return Contract(Source.TORCH, Kind.FUNCTION, name, file, used_in, why, parameters)


_TORCH = (
    _torch("reductions.rebuild_cuda_tensor", _REDUCTIONS, _CUDA, "as rebuild_npu_tensor", *REBUILD_PARAMETERS),
    _torch("reductions.reduce_tensor", _REDUCTIONS, _IPC, "exports a tensor; torch_npu replaces it", "tensor"),
    _torch("reductions.StorageWeakRef", _REDUCTIONS, "memory/torch_saver.py", "whether memory still lives", "storage"),
    _torch("cuda.device_count", _CUDA_INIT, _ACCELERATOR, "as on NPUs"),
    _torch("cuda.set_device", _CUDA_INIT, _ACCELERATOR, "as on NPUs", "device"),
    _torch("cuda.get_device_properties", _CUDA_INIT, _ACCELERATOR, "as on NPUs", "device"),
    _torch("cuda.synchronize", _CUDA_INIT, _ACCELERATOR, "as on NPUs", "device"),
    _torch("cuda.current_stream", _CUDA_INIT, _OVERLAP, "as on NPUs", "device"),
    _torch("cuda.Stream", "torch/cuda/streams.py", _OVERLAP, "as on NPUs"),
    _torch("cuda.stream", _CUDA_INIT, _OVERLAP, "as on NPUs", "stream"),
    *(
        _torch(f"streams.{name}", "torch/cuda/streams.py", _OVERLAP, "as on NPUs", *parameters)
        for name, _, *parameters in _OF_STREAMS
    ),
    _torch("cuda.mem_get_info", _CUDA_MEMORY, _ACCELERATOR, "as on NPUs", "device"),
    _torch("cuda.memory_reserved", _CUDA_MEMORY, _ACCELERATOR, "as on NPUs", "device"),
    _torch("cuda.empty_cache", _CUDA_MEMORY, _ACCELERATOR, "as on NPUs"),
    Contract(
        Source.TORCH,
        Kind.TEXT,
        "_host_emptyCache",
        "torch/_C/__init__.pyi",
        _CUDA,
        "gives cached pinned host memory back after sleep and export",
        spelled="_host_emptyCache",
    ),
    _torch("cuda.MemPool", _CUDA_MEMORY, _ACCELERATOR, "as on NPUs", "allocator"),
    _torch("cuda.use_mem_pool", _CUDA_MEMORY, _ACCELERATOR, "allocates from a pool, in this thread", "pool", "device"),
    _torch("cuda.set_per_process_memory_fraction", _CUDA_MEMORY, _ACCELERATOR, "as on NPUs", "fraction", "device"),
    _torch(
        "cuda.CUDAPluggableAllocator",
        _CUDA_MEMORY,
        _CUDA,
        "as on NPUs",
        "path_to_so_file",
        "alloc_fn_name",
        "free_fn_name",
    ),
)

_ENVIRONMENT = (
    Contract(
        Source.VLLM_ASCEND,
        Kind.TEXT,
        "VLLM_ASCEND_ENABLE_NZ",
        "vllm_ascend/envs.py",
        "profiles/ascend_a2.py",
        "weights in the NZ layout cannot be updated in place",
    ),
    Contract(
        Source.RAY,
        Kind.TEXT,
        "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
        "ray/_private/accelerators/npu.py",
        "profiles/ascend_a2.py",
        "an engine over several devices sets them itself",
        spelled="RAY_EXPERIMENTAL_NOSET_",
    ),
    Contract(
        Source.RAY,
        Kind.TEXT,
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
        "ray/_private/accelerators/nvidia_gpu.py",
        "profiles/cuda.py",
        "as on NPUs",
        spelled="RAY_EXPERIMENTAL_NOSET_",
    ),
    *(
        Contract(
            Source.RAY,
            Kind.TEXT,
            name,
            f"ray/_private/accelerators/{file}.py",
            _KINDS,
            why,
            spelled=spelled,
            executed=file == "npu",
        )
        for name, file, why, spelled in (
            ('return "NPU"', "npu", "resource that counts NPUs", '"NPU"'),
            ('return "GPU"', "nvidia_gpu", "resource that counts GPUs", '"GPU"'),
            ("ASCEND_RT_VISIBLE_DEVICES", "npu", "what Ray sets for an actor", ""),
            ("CUDA_VISIBLE_DEVICES", "nvidia_gpu", "what Ray sets for an actor", ""),
        )
    ),
    Contract(
        Source.RAY,
        Kind.TEXT,
        "NoDevFiles",
        "ray/_private/accelerators/npu.py",
        "devices/visible.py",
        "value of the visible devices for none",
    ),
)

CONTRACTS = (*_TORCH_NPU, *_SAVERS, *_TORCH, *_ENVIRONMENT)
