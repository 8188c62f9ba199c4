"""What the functions of the stand-in torch_npu do; which of them there are, and what they take, the register says."""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing.reductions as reductions

_LIB = Path(__file__).parents[1] / "lib"
_runtime = ctypes.CDLL(str(_LIB / "libstub.so"), mode=ctypes.RTLD_GLOBAL)
_runtime.stub_open.restype = ctypes.c_void_p
_runtime.stub_open.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
_runtime.stub_export.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t)]
torch.ops.load_library(str(_LIB / "device.so"))
_device = ctypes.CDLL(str(_LIB / "device.so"))
_device.stub_reserved.restype = ctypes.c_size_t
_pools = 0


class _Properties:
    uuid = os.environ.get("STUB_UUID", "00000000-0000-0000-0000-000000000000")


def device_count() -> int:
    return int(os.environ.get("STUB_DEVICES", "1"))


def set_device(device: Any) -> None:
    assert device == 0


def get_device_properties(device_name: Any = None) -> Any:
    return _Properties()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _runtime.stub_memory(ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def memory_reserved(device: Any = None) -> int:
    return int(_device.stub_reserved())


def synchronize(device: Any = None) -> None:
    """Everything has run already."""


def empty_cache() -> None:
    _device.stub_empty_cache()


def host_empty_cache() -> None:
    """Nothing is cached."""


class MemPool:
    def __init__(self, allocator: Any = None) -> None:
        global _pools
        _pools += 1
        self.id = _pools
        if allocator is not None:
            _device.stub_pool_allocator(ctypes.c_int64(self.id), allocator)


class MemPoolContext:
    def __init__(self, pool: MemPool) -> None:
        self._pool = pool


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    assert isinstance(fraction, float)
    assert 0 <= fraction <= 1
    _device.stub_limit(ctypes.c_size_t(int(fraction * mem_get_info()[1])))


def _npu_beginAllocateCurrentThreadToPool(device: int, pool: int) -> None:
    _device.stub_pool_begin(ctypes.c_int64(pool))


def _npu_endAllocateCurrentStreamToPool(device: int, pool: int) -> None:
    _device.stub_pool_end(ctypes.c_int64(pool))


class NPUPluggableAllocator:
    def __init__(self, path_to_so_file: str, alloc_fn_name: str, free_fn_name: str) -> None:
        library = ctypes.CDLL(path_to_so_file)
        getattr(library, free_fn_name)
        self._allocate = ctypes.cast(getattr(library, alloc_fn_name), ctypes.c_void_p)

    def allocator(self) -> Any:
        return self._allocate


def install(registered: dict[str, tuple[str, ...]], of_extension: list[str]) -> None:
    """Make `torch.npu`, and `torch_npu._C`, with the registered names."""
    extension = types.ModuleType("torch_npu._C")
    for name in of_extension:
        setattr(extension, name, globals()[name])
    sys.modules["torch_npu"]._C = extension  # type: ignore[attr-defined]
    module = types.ModuleType("torch_npu.npu")
    for name, parameters in registered.items():
        made = globals()[name]
        taken = [p for p in inspect.signature(made).parameters if p != "self"]
        assert tuple(taken[: len(parameters)]) == parameters, f"{name} takes {taken}, the register says {parameters}"
        setattr(module, name, made)
    module.memory = module  # type: ignore[attr-defined]
    # What torch itself asks a device's module for.
    module._lazy_init = lambda: None  # type: ignore[attr-defined]
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.current_device = lambda: 0  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    _device.stub_register()
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", module)
    sys.modules["torch_npu.npu"] = module
    reductions.reduce_tensor = _reduce


def _reduce(tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """Export of a tensor: a name of ordinary memory; mapped memory has none, as with the real driver."""
    from torch_npu.multiprocessing.reductions import rebuild_npu_tensor

    storage = tensor.untyped_storage()
    name, offset = ctypes.create_string_buffer(64), ctypes.c_size_t()
    if _runtime.stub_export(storage.data_ptr(), name, ctypes.byref(offset)):
        raise RuntimeError("aclrtIpcMemGetExportKey failed with 107000")
    return rebuild_npu_tensor, (
        type(tensor),
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        torch.storage.TypedStorage,
        tensor.dtype,
        0,
        name.value + b"\0\xff",
        storage.nbytes(),
        offset.value,
        tensor.requires_grad,
        b"counter",
        0,
        b"event",
        False,
    )


def rebuild_function(parameters: tuple[str, ...]) -> Callable[..., torch.Tensor]:
    """torch_npu's import of a tensor, with values at the registered places."""

    def rebuild_npu_tensor(*values: Any) -> torch.Tensor:
        given = dict(zip(parameters, values, strict=True))
        assert given["storage_device"] == 0, "the importer's own number"
        assert given["tensor_cls"] is torch.Tensor
        assert given["storage_cls"] is torch.storage.TypedStorage
        nbytes, offset = given["storage_size_bytes"], given["storage_offset_bytes"]
        start = _runtime.stub_open(given["storage_handle"].removesuffix(b"\0\xff"), offset + nbytes)
        assert start, "the exported memory is gone"
        storage = torch.ops.rljob_stub.from_address(start + offset, nbytes).untyped_storage()
        empty = torch.empty(0, dtype=given["dtype"], device="npu")
        return empty.set_(storage, given["tensor_offset"], given["tensor_size"], given["tensor_stride"])

    return rebuild_npu_tensor
