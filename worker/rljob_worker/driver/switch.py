"""The switch between training and generation: turns on the devices around the handover of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rljob_worker.cluster.calls import Call
from rljob_worker.driver.handover import Handover
from rljob_worker.engine.engine import Engine
from rljob_worker.trainer.trainer import Trainer


class MemoryReport(Protocol):
    """Report of a trainer or engine on a transition of its memory."""

    def as_record(self) -> dict[str, Any]:
        """For the step record."""
        ...


class Switch(Handover):
    """Lets trainers and engines take turns on the devices that they share; what that did to memory is recorded."""

    engines_asleep = False
    """Whether the engines have given their memory back and taken none since."""

    def sleep_engines(self) -> None:
        """The engines give weights and KV cache back."""
        self._turn("sleep", self._cluster.engines.call(Engine.sleep))
        self.engines_asleep = True

    def wake_trainers(self) -> None:
        """The trainers take their memory back."""
        self._turn("wake_up", self._cluster.trainers.call(Trainer.wake_up))

    def wake_engine_weights(self) -> None:
        """The engines take the memory for weights back."""
        self.engines_asleep = False
        self._turn("wake_weights", self._cluster.engines.call(Engine.wake_weights))

    def sleep_trainers(self) -> None:
        """The trainers give their memory away."""
        self._turn("sleep", self._cluster.trainers.call(Trainer.sleep))

    def wake_engine_kv(self) -> None:
        """The engines take the KV cache back."""
        self._turn("wake_kv", self._cluster.engines.call(Engine.wake_kv))

    def first(self) -> None:
        """Same as `Handover.first`; trainers are asleep afterwards."""
        if not self._cluster.engines_sleep_first:
            self.sleep_engines()
        self.wake_engine_weights()
        self.update_weights()
        self.sleep_trainers()
        self.wake_engine_kv()
        if self.due_probe():
            self.probe_weights()

    def _turn(self, what: str, calls: Sequence[Call[MemoryReport]]) -> None:
        """Let all trainers or engines go to sleep or wake up, and note what that did to their memory."""
        reports = self._calls.gather(what, calls)
        by_process = {call.process: report.as_record() for call, report in zip(calls, reports, strict=True)}
        self._records.memory(self._calls.phase(what), by_process)
