"""Reports of an engine to the driver."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """An engine that answered its warm-up request."""

    import_seconds: float
    load_seconds: float
    warmup_seconds: float
    devices: tuple[str, ...]
    """Identities on their node, one for each tensor-parallel rank."""
    threads: int
    max_model_length: int
    """Tokens of the longest sequence."""
    max_sequences: int
    kv_cache_bytes: int
    """In one tensor-parallel worker."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory of an engine with its tensor-parallel workers, and of its devices, over all their users; bytes."""

    resident_bytes: int
    device_free_bytes: int | None = None
    """None where CPUs stand for devices; so the total."""
    device_total_bytes: int | None = None

    def as_record(self) -> dict[str, int]:
        """For the step record; what there is no reading of is not in it."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Guessed tokens of speculative decoding."""

    proposed: int = 0
    accepted: int = 0
    """Drafted tokens that were right."""

    def __add__(self, other: DraftCounts) -> DraftCounts:
        """Both together."""
        return DraftCounts(self.proposed + other.proposed, self.accepted + other.accepted)


@dataclass(frozen=True, slots=True)
class EngineSlept:
    """Memory that an engine gave back."""

    released_bytes: int
    """That really came free."""
    released_weight_bytes: int
    """Bytes of them that are the weights'; 0 where weights cannot sleep."""
    memory: MemoryReading

    def as_record(self) -> dict[str, int]:
        """For the step record: flat."""
        own = {"released_bytes": self.released_bytes, "released_weight_bytes": self.released_weight_bytes}
        return own | self.memory.as_record()


@dataclass(frozen=True, slots=True)
class EngineWoke:
    """Memory that an engine took back."""

    resumed_bytes: int
    memory: MemoryReading

    def as_record(self) -> dict[str, int]:
        """For the step record: flat."""
        return {"resumed_bytes": self.resumed_bytes} | self.memory.as_record()
