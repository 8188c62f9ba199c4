"""A rank's memory, and its communicators where the job asks for it, given away and taken back."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api import derived
from rljob_api.quantities import to_number
from rljob_api.spec import RLJobSpec
from rljob_worker.devices import Device
from rljob_worker.memory.sleeping import SleepingMemory
from rljob_worker.memory.states import MemorySaver, MemorySaverState, Transition
from rljob_worker.trainer.process_groups import ProcessGroups


@dataclass(frozen=True, slots=True)
class MemoryMove:
    """What going to sleep or waking up did."""

    transition: Transition | None
    """None where the memory saver is off."""
    group_seconds: float = 0.0
    """That giving up or rebuilding the process groups took; 0 where they stay."""


class RankMemory:
    """What of a rank sleeps. Where `memorySaver.releaseProcessGroups` says so, both calls are collective.

    Args:
        spec: the job.
        device: the rank's.
        memory: where its tensors are; None where the memory saver is off.
        groups: all that it is in.
    """

    def __init__(self, spec: RLJobSpec, device: Device, memory: SleepingMemory | None, groups: ProcessGroups) -> None:
        self._saver: MemorySaver | None = None
        if memory is not None:
            self._margin_bytes = to_number(spec.memory_saver.train_memory_margin)
            self._saver = MemorySaver(memory, device, margin_bytes=self._margin_bytes)
            self._device = device
            device.keep_free(self._margin_bytes)
        self._groups = groups if derived.release_process_groups(spec) else None

    def sleep(self) -> MemoryMove:
        """Give it away: the groups first, while the devices can still talk; nothing when asleep."""
        if self._saver is None:
            return MemoryMove(None)
        seconds = self._groups.release() if self._groups is not None else 0.0
        return MemoryMove(self._saver.pause(), seconds)

    def wake_up(self) -> MemoryMove:
        """Take it back; nothing when awake. Raises when too little memory is free, and stays asleep then."""
        if self._saver is None:
            return MemoryMove(None)
        done = self._saver.resume()
        self._device.keep_free(self._margin_bytes)
        return MemoryMove(done, self._groups.rebuild() if self._groups is not None else 0.0)

    def require_awake(self, what: str) -> None:
        """TransitionRefused, naming `what`, when asleep."""
        if self._saver is not None:
            self._saver.require(MemorySaverState.ACTIVE, what)


class SleepingBackend:
    """What training backends share: how a rank of theirs sleeps."""

    def __init__(self, memory: RankMemory) -> None:
        self._rank_memory = memory

    def sleep(self) -> MemoryMove:
        """Give memory and, where the job says so, communicators away."""
        return self._rank_memory.sleep()

    def wake_up(self) -> MemoryMove:
        """Take them back."""
        return self._rank_memory.wake_up()

    def require_awake(self, what: str) -> None:
        """TransitionRefused, naming `what`, when asleep."""
        self._rank_memory.require_awake(what)
