"""The memory ledger: what each phase leaves free, used and paused, per rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rljob_worker.devices.base import Device
from rljob_worker.host.memory import process_resident_bytes
from rljob_worker.memory.arena import Arena
from rljob_worker.memory.states import MemorySaverBackend


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One reading; bytes."""

    rank: int
    phase: str
    free: int
    """Free on the device, under the tightest limit."""
    used: int
    """In use on the device by everybody."""
    paused: int
    """Given away by the memory saver."""
    backup: int
    """Host memory that keeps contents of what is paused."""
    arena_resident: int | None
    """Physical pages behind the CPU arena's ranges, the backup apart; None where not asked for or no arena."""
    process_resident: int
    """Resident bytes of this process, a backup on the CPU included."""

    def as_dict(self) -> dict[str, int | str | None]:
        """For the step record."""
        return asdict(self)


class MemoryLedger:
    """Takes readings of one rank. Reading frees nothing and empties no cache."""

    def __init__(
        self,
        rank: int,
        device: Device,
        backend: MemorySaverBackend | None = None,
    ) -> None:
        self._rank = rank
        self._device = device
        self._backend = backend

    def record(self, phase: str, *, resident: bool = False) -> LedgerEntry:
        """Read: well under 1 ms, but milliseconds with `resident` (smaps of the whole process)."""
        info = self._device.memory_info()
        backend = self._backend
        arena = backend if isinstance(backend, Arena) else None
        return LedgerEntry(
            rank=self._rank,
            phase=phase,
            free=info.free,
            used=info.used,
            paused=backend.paused_bytes if backend else 0,
            backup=backend.backup_bytes if backend else 0,
            arena_resident=arena.resident_bytes() if arena and resident else None,
            process_resident=process_resident_bytes(),
        )
