"""Turns of an engine with the trainers: the memory that it can give back, and the bytes that really moved."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from rljob_worker.engine.device_extension import DeviceWorkerExtension
from rljob_worker.engine.reports import EngineSlept, EngineWoke, MemoryReading
from rljob_worker.engine.worker_extension import CpuWorkerExtension, WorkerExtension
from rljob_worker.errors import UserError
from rljob_worker.host.memory import process_resident_bytes

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

W = TypeVar("W", bound=WorkerExtension)
T = TypeVar("T")
_DISCARD = 2
"""vLLM's sleep level that gives all memory back and keeps nothing: weights come anew from the trainers."""
_KEEP = 1
"""The one that copies the weights to host memory."""


class SleepController(ABC):
    """One engine's memory; the engine calls it in the order that `states.EngineState` allows, when it is idle."""

    def __init__(self, engine: LLMEngine, drain: Callable[[], None], *, keeps_weights: bool = False) -> None:
        """Take over a built engine.

        Args:
            engine: vLLM's engine.
            drain: runs it until its scheduler has forgotten all requests.
            keeps_weights: nobody sends it any; one that is sent them samples, too.
        """
        self._engine = engine
        self._drain = drain
        self._keeps_weights = keeps_weights
        if not keeps_weights:
            self._on_workers(WorkerExtension.rljob_prepare)

    @abstractmethod
    def after_warm_up(self) -> None:
        """Give back what only the warm-up request needed."""

    @abstractmethod
    def sleep(self) -> EngineSlept:
        """Give back what can be given back."""

    @abstractmethod
    def wake_weights(self) -> EngineWoke:
        """Take the memory for the weights back."""

    @abstractmethod
    def wake_kv(self) -> EngineWoke:
        """Take the KV cache back."""

    @abstractmethod
    def wake(self) -> EngineWoke:
        """Take weights that were kept and the KV cache back."""

    @abstractmethod
    def check_graphs(self) -> None:
        """Look whether graphs were captured, on devices.

        Raises:
            UserError: they were asked for, and vLLM went on without.
        """

    def kv_cache_bytes(self) -> int:
        """Size of the KV cache in one worker."""
        return self._on_workers(WorkerExtension.rljob_kv_cache_bytes)[0]

    def devices(self) -> list[str]:
        """Identity of each worker's device, in the order of the tensor-parallel ranks."""
        return self._on_workers(WorkerExtension.rljob_device_identity)

    def memory(self) -> MemoryReading:
        """Pages of this process and its tensor-parallel workers; reading changes nothing."""
        pids = [os.getpid(), *(worker.proc.pid for worker in getattr(self._engine.model_executor, "workers", ()))]
        return MemoryReading(sum(map(process_resident_bytes, pids)))

    def forget_prefixes(self) -> None:
        """Drop keys and values of prompts and features of pictures; RuntimeError while requests hold them."""
        self._drain()
        # Of the weights before, without a word.
        self._engine.engine_core.reset_encoder_cache()
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("engine: the prefix cache cannot be reset while requests hold blocks")

    def _on_workers(self, method: Callable[[W], T]) -> list[T]:
        """Results of each worker's method, in the order of the tensor-parallel ranks.

        vLLM finds what it mixed into its worker by the method's name; a callable would be given vLLM's wrapper of the
        worker instead of the worker.
        """
        answers: list[T] = self._engine.collective_rpc(method.__name__)
        return answers


class CpuSleepController(SleepController):
    """vLLM cannot sleep on CPU: the KV cache's pages are given back, the packed weights stay where they are."""

    def check_graphs(self) -> None:
        """Nothing to look at: on CPU the model is compiled."""

    def after_warm_up(self) -> None:
        """The pages that it touched."""
        self._release_kv_cache()

    def sleep(self) -> EngineSlept:
        """The KV cache's resident pages."""
        return EngineSlept(self._release_kv_cache(), 0, self.memory())

    def wake_weights(self) -> EngineWoke:
        """They never left."""
        return EngineWoke(0, self.memory())

    def wake_kv(self) -> EngineWoke:
        """Its pages come back as they are touched."""
        return EngineWoke(0, self.memory())

    def wake(self) -> EngineWoke:
        """Likewise."""
        return EngineWoke(0, self.memory())

    def _release_kv_cache(self) -> int:
        self.forget_prefixes()
        return sum(self._on_workers(CpuWorkerExtension.rljob_release_kv_cache))


class DeviceSleepController(SleepController):
    """vLLM's sleep mode: weights and KV cache lie in pools of their own, which it unmaps and maps again."""

    def after_warm_up(self) -> None:
        """Nothing: its memory is the engine's own pool."""
        self.forget_prefixes()

    def sleep(self) -> EngineSlept:
        """Everything, by the devices' free memory; `released_weight_bytes` is the size of parameters and buffers."""
        self.forget_prefixes()
        weights = sum(self._on_workers(DeviceWorkerExtension.rljob_weight_bytes))
        level = _KEEP if self._keeps_weights else _DISCARD
        released = self._freed(lambda: self._engine.sleep(level=level))
        return EngineSlept(released, weights, self.memory())

    def wake_weights(self) -> EngineWoke:
        """Memory without content: the next thing to do is to receive weights."""
        self._on_workers(DeviceWorkerExtension.rljob_note_parameters)
        resumed = -self._freed(lambda: self._engine.wake_up(tags=["weights"]))
        self._on_workers(DeviceWorkerExtension.rljob_restore_parameters)
        return EngineWoke(resumed, self.memory())

    def wake_kv(self) -> EngineWoke:
        """An empty cache."""
        resumed = -self._freed(lambda: self._engine.wake_up(tags=["kv_cache"]))
        self.forget_prefixes()
        return EngineWoke(resumed, self.memory())

    def wake(self) -> EngineWoke:
        """The weights as they were, and an empty cache."""
        resumed = -self._freed(lambda: self._engine.wake_up())
        self.forget_prefixes()
        return EngineWoke(resumed, self.memory())

    def check_graphs(self) -> None:
        """Look for captured graphs of whole decoding steps, in each worker."""
        found = self._on_workers(DeviceWorkerExtension.rljob_captured_graphs)
        if min(found) == 0:
            raise UserError(
                f"spec.rollout.graphMode: vLLM captured no graph of a decoding step in {found.count(0)} of "
                f"{len(found)} workers: the model's attention cannot be captured on this device; use false"
            )

    def memory(self) -> MemoryReading:
        """The devices' too."""
        info = self._on_workers(DeviceWorkerExtension.rljob_device_memory)
        return replace(
            super().memory(), device_free_bytes=sum(i[0] for i in info), device_total_bytes=sum(i[1] for i in info)
        )

    def _freed(self, action: Callable[[], object]) -> int:
        before = self._free_bytes()
        action()
        return self._free_bytes() - before

    def _free_bytes(self) -> int:
        return sum(free for free, _ in self._on_workers(DeviceWorkerExtension.rljob_device_memory))
