"""What the sides of a weight sync tell the workers of an engine and their callers: plain values by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NotRequired, TypedDict

Checksums = list[list[int]]
"""[tensor of the bucket][piece of the tensor]."""


class BeginSync(TypedDict):
    """Opens a sync in a worker."""

    version: int
    plan: str
    """Its fingerprint."""
    folder: str
    slots: list[str]
    """Names of those in host memory."""
    slot_bytes: int
    seconds: float
    """Until the deadline."""


class LandBucket(TypedDict):
    """Has a worker land what is in a slot."""

    version: int
    bucket: int
    checksums: Checksums
    """The trainers', over their own parameters."""


class FinishSync(TypedDict):
    """Closes a sync in a worker."""

    version: int
    names: list[str]
    """Of all tensors, in the order in which they landed."""


class WorkerReport(TypedDict):
    """What every answer of a worker has."""

    seconds: dict[str, float]
    """By part: `begin`, `land`, `repack`, `finish`."""


class BucketReport(WorkerReport):
    """What a worker landed."""

    names: list[str]
    checksums: list[list[int | None]]
    """As `Checksums`, of what landed; None for a piece that this worker has no part of."""


class FinishReport(WorkerReport):
    """What a worker has now."""

    version: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's answer where it failed."""

    reason: str


class EngineReport(TypedDict):
    """What an engine did in a sync; `seconds` in all, and of those its parts."""

    version: int
    bytes: int
    tensors: int
    buckets: int
    verified: bool
    mode: str
    seconds: float
    begin_seconds: float
    wait_seconds: float
    """For trainers."""
    land_seconds: float
    """Copies with their checksums."""
    repack_seconds: float
    """What vLLM packs."""
    finish_seconds: float
    rpc_seconds: float
    """The way to the workers."""


class TrainerReport(TypedDict):
    """What a trainer did in a sync; `seconds` in all, and of those its parts, which one that sends nothing has not."""

    version: int
    bytes: int
    tensors: int
    pieces: int
    staging_bytes: int
    """Of the slots that it owns."""
    seconds: float
    read_seconds: NotRequired[float]
    fill_seconds: NotRequired[float]
    """Copying and checksums."""
    spread_seconds: NotRequired[float]
    """Exchange with the host's other trainers."""
    wait_seconds: NotRequired[float]
    """For engines and other trainers."""
