"""Parts of a plan of a job's memory."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_worker.planning.engine import EngineMemory
from rljob_worker.planning.job_shape import JobShape, MicroBatch

GIB = 2**30
Bytes = dict[str, int]
"""Component -> bytes."""

KEPT_FREE = "kept free"
"""Component of what must stay free: memorySaver.trainMemoryMargin, checked before the trainer wakes."""


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Content of one memory at the peak of a phase."""

    phase: str
    components: Bytes

    @property
    def total(self) -> int:
        """Bytes of all components."""
        return sum(self.components.values())


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """One memory over all phases."""

    title: str
    limit: int | None
    """Bytes there are; None where it is not known."""
    phases: list[PhaseMemory]
    setting: str = ""
    """Field of the job that gives it more; empty where none does."""

    @property
    def peak(self) -> PhaseMemory:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def over(self) -> int:
        """Bytes that are missing at the peak; 0 where it fits or nothing limits it."""
        return 0 if self.limit is None else max(0, self.peak.total - self.limit)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory that a job will need."""

    job: JobShape
    engine: EngineMemory
    batch: MicroBatch
    devices: list[MemoryTable]
    """One for each kind of rank: a pipeline stage, with the engine rank on the same device, or beside it."""
    hosts: list[MemoryTable]
    """Tables of the fullest node of each group."""
    handed_over: int
    """Bytes that an engine gets in a step."""
    of_model: int
    """Bytes of all tensors of the model in that format."""
    longest: int | None = None
    """Tokens of the longest sequence that fits a trainer's device as a micro-batch of its own; None: not known."""

    @property
    def tables(self) -> list[MemoryTable]:
        """All of them."""
        return [*self.devices, *self.hosts]

    @property
    def engine_short(self) -> int:
        """Bytes that the KV cache lacks for one sequence of the longest length."""
        return max(0, self.engine.kv_needed - self.engine.kv_cache)

    @property
    def missing(self) -> int:
        """Bytes that are missing in all: 0 when the job fits."""
        return sum(table.over for table in self.tables) + self.engine_short

    @property
    def fits(self) -> bool:
        """Whether everything has room."""
        return self.missing == 0


def used(components: Bytes) -> Bytes:
    """Components that take any memory."""
    return {name: nbytes for name, nbytes in components.items() if nbytes}
