"""Shared parts of training backends: a rank's memory and communicators, given away and taken back, and its
reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from rljob_api import derived
from rljob_api.quantities import to_number
from rljob_api.spec import RLJobSpec
from rljob_worker.algorithms import get_algorithm
from rljob_worker.devices import Device
from rljob_worker.memory.sleeping import SleepingMemory
from rljob_worker.memory.states import MemorySaver, MemorySaverState, Transition
from rljob_worker.trainer.process_groups import ProcessGroups
from rljob_worker.trainer.snapshots import Reference


@dataclass(frozen=True, slots=True)
class MemoryMove:
    """Report on going to sleep or waking up."""

    transition: Transition | None
    """None where the memory saver is off."""
    group_seconds: float = 0.0
    """That giving up or rebuilding the process groups took; 0 where they stay."""


@dataclass(slots=True)
class Rounding:
    """Loss of a hand-over of merged adapters, in sums over the parts that this rank handed over."""

    change: float = 0.0
    """Sum of |scale B A|."""
    lost: float = 0.0
    """Sum of its distance from the change of the rounded weights."""


class RankBackend:
    """State that training backends share: how a rank sleeps, and its reference policy.

    Where `memorySaver.releaseProcessGroups` says so, `sleep` and `wake_up` are collective.

    Args:
        spec: the job.
        device: the rank's.
        memory: where its tensors are; None where the memory saver is off.
        groups: all that it is in.
        trained: parameters, which hold the starting weights now.
        starting: what makes the model the starting one without a copy of its weights.
    """

    def __init__(
        self,
        spec: RLJobSpec,
        device: Device,
        memory: SleepingMemory | None,
        groups: ProcessGroups,
        trained: list[Tensor],
        starting: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.memory = memory
        self.groups = groups
        self.trained = trained
        self._saver: MemorySaver | None = None
        if memory is not None:
            self._margin_bytes = to_number(spec.memory_saver.train_memory_margin)
            self._saver = MemorySaver(memory, device, margin_bytes=self._margin_bytes)
            self._device = device
            device.keep_free(self._margin_bytes)
        self._released = groups if derived.release_process_groups(spec) else None
        needs_reference = get_algorithm(spec.algorithm.name).needs_reference(spec.algorithm)
        self._starting = starting
        self._reference = Reference(trained) if needs_reference and starting is None else None

    def reference(self) -> AbstractContextManager[None]:
        """The starting weights in the place of the present ones."""
        if self._starting is not None:
            return self._starting()
        if self._reference is None:
            raise RuntimeError("ref_log_probs: this job has no reference policy (algorithm.kl)")
        return self._reference

    def handing_over(self) -> AbstractContextManager[Rounding | None]:
        """Nothing: pieces are views."""
        return nullcontext()

    def sleep(self) -> MemoryMove:
        """Give it away: the groups first, while the devices can still talk; nothing when asleep."""
        if self._saver is None:
            return MemoryMove(None)
        seconds = self._released.release() if self._released is not None else 0.0
        return MemoryMove(self._saver.pause(), seconds)

    def wake_up(self) -> MemoryMove:
        """Take it back; nothing when awake. Raises when too little memory is free, and stays asleep then."""
        if self._saver is None:
            return MemoryMove(None)
        done = self._saver.resume()
        self._device.keep_free(self._margin_bytes)
        return MemoryMove(done, self._released.rebuild() if self._released is not None else 0.0)

    def require_awake(self, what: str) -> None:
        """TransitionRefused, naming `what`, when asleep."""
        if self._saver is not None:
            self._saver.require(MemorySaverState.ACTIVE, what)
