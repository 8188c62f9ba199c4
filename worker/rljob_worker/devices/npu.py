"""Ascend NPUs, by torch_npu."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
from torch.distributed import Store

from rljob_worker.devices.accelerator import AcceleratorDevice, DeviceModule
from rljob_worker.devices.base import Group, MemoryPool
from rljob_worker.errors import UserError


class _NpuModule(DeviceModule, Protocol):
    def host_empty_cache(self) -> None: ...

    def MemPoolContext(self, pool: MemoryPool) -> object: ...


class NpuDevice(AcceleratorDevice):
    """One Ascend NPU."""

    _module: _NpuModule
    name = "npu"
    visible_devices_variable = "ASCEND_RT_VISIBLE_DEVICES"
    process_group_backend = "cpu:gloo,npu:hccl"
    allocator_variable = "PYTORCH_NPU_ALLOC_CONF"
    hooked_function = "aclrtMallocAlign32"

    @classmethod
    def check_installed(cls) -> None:
        """torch_npu is to be installed; whether it loads, the processes that use a device find out."""
        if "torch_npu" not in sys.modules and importlib.util.find_spec("torch_npu") is None:
            raise UserError(
                f"torch_npu is not installed; use the worker image for Ascend, or install the torch_npu that fits "
                f"torch {torch.__version__}"
            )

    @classmethod
    def _load(cls) -> DeviceModule:
        try:
            importlib.import_module("torch_npu")
        except ImportError as error:
            raise UserError(
                f"torch_npu does not load ({error}); source CANN's set_env.sh before Python starts, and take the "
                f"torch_npu that fits torch {torch.__version__}"
            ) from error
        module: _NpuModule = torch.get_device_module("npu")
        return module

    @classmethod
    def _rebuild(cls) -> Callable[..., torch.Tensor]:
        rebuild: Callable[..., torch.Tensor] = importlib.import_module(
            "torch_npu.multiprocessing.reductions"
        ).rebuild_npu_tensor
        return rebuild

    def join_group(self, store: Store, rank: int, size: int, address: str, timeout: timedelta) -> Group:
        """See `Device`: HCCL, as torch_npu makes it for `init_process_group`."""
        made = sys.modules["torch_npu"]._C._distributed_c10d.ProcessGroupHCCL
        options = made.Options()
        options.is_high_priority_stream = False
        options._timeout = timeout
        options.global_ranks_in_group = list(range(size))
        options.group_id = "rljob-broadcast"
        group: Group = made(store, rank, size, options)
        return group

    @contextmanager
    def use_pool(self, pool: MemoryPool) -> Iterator[None]:
        """See `AcceleratorMemory`; torch_npu's own `use_mem_pool` takes what other threads make as well."""
        torch_npu = sys.modules["torch_npu"]
        context = self._module.MemPoolContext(pool)
        torch_npu._C._npu_beginAllocateCurrentThreadToPool(self._logical, pool.id)
        try:
            yield
        finally:
            torch_npu._C._npu_endAllocateCurrentStreamToPool(self._logical, pool.id)
            del context

    def empty_host_cache(self) -> None:
        """Give the pinned host memory back that torch_npu keeps for later transfers."""
        self._module.host_empty_cache()

    def _pluggable_allocator(self, library: str, allocate: str, free: str) -> object:
        return self._module.memory.NPUPluggableAllocator(library, allocate, free).allocator()
