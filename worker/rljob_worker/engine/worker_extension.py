"""RLJob's methods in vLLM's workers; vLLM mixes the class of the device's kind into the worker's bases."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import astuple
from typing import Protocol

from rljob_worker.devices.profiling import ProfileOrder, WorkProfiler
from rljob_worker.engine.kv_caches import KvCaches, kv_cache_storages
from rljob_worker.upstream import vllm_types
from rljob_worker.upstream.vllm_drafts import KeyedVerification, verify_by_drawing
from rljob_worker.upstream.vllm_sampler import key_noise
from rljob_worker.weightsync.vllm_extension import WeightLandingExtension

_MADV_DONTNEED = 4


class ModelRunner(vllm_types.ModelRunner, Protocol):
    """With the caches that are given back."""

    kv_caches: KvCaches


class WorkerExtension(WeightLandingExtension):
    """Methods for all kinds of devices; landing weights comes with the base."""

    model_runner: ModelRunner
    _rljob_verification: KeyedVerification | None = None
    _rljob_profile: tuple[WorkProfiler, ExitStack] | None = None

    def rljob_prepare(self) -> None:
        """Have the sampler draw by request and position, drafts or not."""
        self._rljob_verification = verify_by_drawing(self.model_runner, key_noise(self.model_runner))

    def rljob_take_draft_counts(self) -> tuple[int, int]:
        """Drafts that were proposed and accepted since the last time."""
        return (0, 0) if self._rljob_verification is None else self._rljob_verification.take_counts()

    def rljob_begin_profile(self, files: Sequence[str], most_bytes: int, stacks: bool) -> None:
        """Profile what this worker does from now on, into the file of its rank."""
        profiler, stack = WorkProfiler(self.rljob_device().name), ExitStack()
        profiler.ask(ProfileOrder(files[self.rank if len(files) > 1 else 0], most_bytes, stacks))
        stack.enter_context(profiler.work())
        self._rljob_profile = profiler, stack

    def rljob_end_profile(self) -> list[tuple[str, int, str]]:
        """End the profile; the fields of its `ProfileResult`, none where none was begun."""
        if self._rljob_profile is None:
            return []
        (profiler, stack), self._rljob_profile = self._rljob_profile, None
        stack.close()
        return [astuple(result) for result in profiler.results()]

    def rljob_device_identity(self) -> str:
        """Identity of this worker's device, as its trainer's."""
        return self.rljob_device().identity()

    def rljob_kv_cache_bytes(self) -> int:
        """Size of the KV cache."""
        return sum(kv_cache_storages(self.model_runner.kv_caches).values())


class CpuWorkerExtension(WorkerExtension):
    """Memory hand-over on CPU."""

    def rljob_release_kv_cache(self) -> int:
        """Give the KV cache's pages back to the system; bytes that were resident. They read as zero afterwards."""
        released = 0
        for start, length in _kv_cache_ranges(self.model_runner.kv_caches):
            released += _resident_bytes(start, length)
            if _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED) != 0:
                raise OSError(ctypes.get_errno(), "madvise on the KV cache failed")
        return released


def _kv_cache_ranges(kv_caches: KvCaches) -> Iterator[tuple[int, int]]:
    """Whole pages inside each distinct storage: (address, length)."""
    for address, size in kv_cache_storages(kv_caches).items():
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
