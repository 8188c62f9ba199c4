"""Reports of a trainer to the driver."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rljob_api.json_types import Json
from rljob_worker.memory.ledger import LedgerEntry
from rljob_worker.memory.states import Transition


@dataclass(frozen=True, slots=True)
class TrainerStarted:
    """A trainer that was built."""

    device: str
    """Identity of its device on its node."""
    coordinates: dict[str, int]
    """Coordinates in the parallel layout."""
    parameters: int
    """Elements of its shard of the model."""
    seconds: float
    """That building it took."""


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Changes of a trainer's memory by going to sleep or waking up."""

    transition: Transition | None
    """None where the memory saver is off."""
    group_seconds: float
    """That giving up or rebuilding the process groups took; 0 where they stay."""
    reading: LedgerEntry
    """The ledger afterwards."""

    def as_record(self) -> dict[str, Json]:
        """For the step record: flat, bytes and seconds."""
        moved: dict[str, Json] = {"changed": False, "seconds": 0.0, "moved_bytes": 0, "backup_bytes": 0}
        if self.transition is not None:
            moved = asdict(self.transition)
        return moved | {"group_seconds": self.group_seconds} | self.reading.as_dict()
