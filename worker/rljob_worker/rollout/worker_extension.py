"""What RLJob adds to vLLM's workers on CPU; vLLM mixes this class into the worker's bases."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from typing import Any

import torch

import rljob_worker.rollout.cpu_norms  # noqa: F401  (registers its kernels)
from rljob_worker.devices.gloo import share_gloo_loop
from rljob_worker.rollout.cpu_sampler import SeededSampler
from rljob_worker.rollout.kv_caches import kv_cache_storages
from rljob_worker.rollout.platforms import TORCH_LINEAR
from rljob_worker.weightsync.vllm_extension import WeightLandingExtension

_MADV_DONTNEED = 4
_PACKED_FOR_ROWS = 64


class RolloutWorkerExtension(WeightLandingExtension):
    """Memory hand-over; landing weights comes with the base."""

    model_runner: Any

    def rljob_prepare(self) -> None:
        """Draw tokens with `SeededSampler` from now on."""
        self.model_runner.sampler.topk_topp_sampler.forward = SeededSampler()

    def rljob_release_kv_cache(self) -> int:
        """Give the KV cache's pages back to the system; bytes that were resident. They read as zero afterwards."""
        released = 0
        for start, length in _kv_cache_ranges(self.model_runner.kv_caches):
            released += _resident_bytes(start, length)
            if _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED) != 0:
                raise OSError(ctypes.get_errno(), "madvise on the KV cache failed")
        return released

    def rljob_kv_cache_resident_bytes(self) -> int:
        """Bytes of the KV cache that occupy memory now."""
        return sum(_resident_bytes(start, length) for start, length in _kv_cache_ranges(self.model_runner.kv_caches))


def _use_torch_linear() -> None:
    """Have vLLM pack and multiply with torch's oneDNN operators in the place of its own ones from now on."""
    import vllm._custom_ops as ops

    of_earlier_models = ops.onednn_mm

    def pack(weight: torch.Tensor, primitive_cache_size: int = 0) -> torch.Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight.t(), _PACKED_FOR_ROWS)

    def multiply(packed: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not isinstance(packed, torch.Tensor):
            return of_earlier_models(packed, x, bias)
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    ops.create_onednn_mm, ops.onednn_mm = pack, multiply  # type: ignore[assignment]


# At import, because each worker process imports its extension before it makes groups and builds the model.
share_gloo_loop()
if os.environ.get(TORCH_LINEAR) == "1":
    _use_torch_linear()


def _kv_cache_ranges(tensors: list[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Whole pages inside each distinct storage: (address, length)."""
    for address, size in kv_cache_storages(tensors).items():
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            yield start, end - start


def _resident_bytes(start: int, length: int) -> int:
    pages = (ctypes.c_ubyte * (length // mmap.PAGESIZE))()
    if _libc().mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), pages) != 0:
        raise OSError(ctypes.get_errno(), "mincore on the KV cache failed")
    return bytes(pages).count(1) * mmap.PAGESIZE


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
