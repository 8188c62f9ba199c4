"""How an engine takes turns with the trainers: what it can give back, and the bytes that really moved."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_DISCARD = 2
"""vLLM's sleep level that gives all memory back and keeps nothing: weights come anew from the trainers."""


class Turns(ABC):
    """One engine's memory; the engine calls it in the order that `states.EngineState` allows, when it is idle."""

    def __init__(self, engine: LLMEngine, drain: Callable[[], None]) -> None:
        """Take over a built engine.

        Args:
            engine: vLLM's engine.
            drain: runs it until its scheduler has forgotten all requests.
        """
        self._engine = engine
        self._drain = drain
        self._rpc("rljob_prepare")

    @abstractmethod
    def after_warm_up(self) -> None:
        """Give back what only the warm-up request needed."""

    @abstractmethod
    def sleep(self) -> dict[str, int]:
        """Give back what can be given back: `released_bytes`, of which `released_weight_bytes`, and `memory`."""

    @abstractmethod
    def wake_weights(self) -> dict[str, int]:
        """Take the memory for the weights back: `resumed_bytes` and `memory`."""

    @abstractmethod
    def wake_kv(self) -> dict[str, int]:
        """Take the KV cache back: `resumed_bytes` and `memory`."""

    def kv_cache_bytes(self) -> int:
        """Size of the KV cache in one worker."""
        return int(self._rpc("rljob_kv_cache_bytes")[0])

    def devices(self) -> list[str]:
        """Identity of each worker's device, in the order of the tensor-parallel ranks."""
        return list(self._rpc("rljob_device_identity"))

    def memory(self) -> dict[str, int]:
        """`resident_bytes` of this process and its tensor-parallel workers; reading changes nothing."""
        pids = [os.getpid(), *(worker.proc.pid for worker in getattr(self._engine.model_executor, "workers", ()))]
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
        return {"resident_bytes": pages * os.sysconf("SC_PAGE_SIZE")}

    def _forget_prefixes(self) -> None:
        self._drain()
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("engine: the prefix cache cannot be reset while requests hold blocks")

    def _rpc(self, method: str) -> Sequence[Any]:
        answers: Sequence[Any] = self._engine.collective_rpc(method)
        return answers


class CpuTurns(Turns):
    """vLLM cannot sleep on CPU: the KV cache's pages are given back, the packed weights stay where they are."""

    def after_warm_up(self) -> None:
        """The pages that it touched."""
        self._release_kv_cache()

    def sleep(self) -> dict[str, int]:
        """The KV cache's resident pages; `released_weight_bytes` is 0."""
        return {"released_bytes": self._release_kv_cache(), "released_weight_bytes": 0} | self.memory()

    def wake_weights(self) -> dict[str, int]:
        """They never left."""
        return {"resumed_bytes": 0} | self.memory()

    def wake_kv(self) -> dict[str, int]:
        """Its pages come back as they are touched."""
        return {"resumed_bytes": 0} | self.memory()

    def _release_kv_cache(self) -> int:
        self._forget_prefixes()
        return sum(self._rpc("rljob_release_kv_cache"))


class DeviceTurns(Turns):
    """vLLM's sleep mode: weights and KV cache lie in pools of their own, which it unmaps and maps again."""

    def after_warm_up(self) -> None:
        """Nothing: its memory is the engine's own pool."""
        self._forget_prefixes()

    def sleep(self) -> dict[str, int]:
        """Everything, by the devices' free memory; `released_weight_bytes` is the size of parameters and buffers."""
        self._forget_prefixes()
        weights = sum(self._rpc("rljob_weight_bytes"))
        released = self._freed(lambda: self._engine.sleep(level=_DISCARD))
        return {"released_bytes": released, "released_weight_bytes": weights} | self.memory()

    def wake_weights(self) -> dict[str, int]:
        """Memory without content: the next thing to do is to receive weights."""
        self._rpc("rljob_note_parameters")
        resumed = -self._freed(lambda: self._engine.wake_up(tags=["weights"]))
        self._rpc("rljob_restore_parameters")
        return {"resumed_bytes": resumed} | self.memory()

    def wake_kv(self) -> dict[str, int]:
        """An empty cache."""
        resumed = -self._freed(lambda: self._engine.wake_up(tags=["kv_cache"]))
        self._forget_prefixes()
        return {"resumed_bytes": resumed} | self.memory()

    def memory(self) -> dict[str, int]:
        """Also `device_free_bytes` and `device_total_bytes` over the engine's devices, whoever uses them."""
        info = self._rpc("rljob_device_memory")
        sizes = {"device_free_bytes": sum(i[0] for i in info), "device_total_bytes": sum(i[1] for i in info)}
        return super().memory() | sizes

    def _freed(self, action: Callable[[], object]) -> int:
        before = sum(free for free, _ in self._rpc("rljob_device_memory"))
        action()
        return int(sum(free for free, _ in self._rpc("rljob_device_memory")) - before)
