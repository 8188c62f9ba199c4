"""NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.multiprocessing.reductions as reductions
from torch.distributed import Store

from rljob_worker.devices.accelerator import AcceleratorDevice, DeviceModule
from rljob_worker.devices.base import Group
from rljob_worker.errors import UserError


class CudaDevice(AcceleratorDevice):
    """One GPU, or one MIG slice of it."""

    name = "cuda"
    visible_devices_variable = "CUDA_VISIBLE_DEVICES"
    process_group_backend = "cpu:gloo,cuda:nccl"
    allocator_variable = "PYTORCH_CUDA_ALLOC_CONF"
    hooked_function = "cudaMalloc"
    names_allowed = True

    @classmethod
    def check_installed(cls) -> None:
        """torch is to be its CUDA build."""
        if torch.version.cuda is None:
            raise UserError(
                f"torch {torch.__version__} is built without CUDA; use the worker image for CUDA, or install torch's "
                "CUDA build"
            )

    @classmethod
    def _load(cls) -> DeviceModule:
        module: DeviceModule = torch.get_device_module("cuda")
        return module

    @classmethod
    def _rebuild(cls) -> Callable[..., torch.Tensor]:
        rebuild: Callable[..., torch.Tensor] = reductions.rebuild_cuda_tensor
        return rebuild

    def join_group(self, store: Store, rank: int, size: int, address: str, timeout: timedelta) -> Group:
        """See `Device`: NCCL."""
        from torch.distributed import ProcessGroupNCCL  # torch's CUDA build alone has it

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        group: Group = ProcessGroupNCCL(store, rank, size, options)  # type: ignore[assignment]  # torch's stubs lack it
        return group

    def empty_host_cache(self) -> None:
        """Give the pinned host memory back that torch keeps for later transfers."""
        torch._C._host_emptyCache()

    def _pluggable_allocator(self, library: str, allocate: str, free: str) -> object:
        return self._module.memory.CUDAPluggableAllocator(library, allocate, free).allocator()
