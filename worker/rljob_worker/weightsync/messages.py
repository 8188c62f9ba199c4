"""Messages between an engine's side of the weight sync and its workers: plain values by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

Checksums = list[int]
"""Checksums of each piece of a bucket: those of its first tensor, of its second, ..."""


class BeginSync(TypedDict):
    """Opens a sync in a worker."""

    version: int
    plan: str
    """Its fingerprint."""
    route: str
    """Route as `route_from` reads it."""
    slots: list[str]
    """Names of those in host memory."""
    slot_bytes: int
    seconds: float
    """Until the deadline."""


class JoinRoute(TypedDict):
    """Has a worker join those that get the buckets over the network."""

    version: int
    engine: int
    """Its number among all that the route serves."""
    anew: bool
    """The sync before did not end well, and neither did its group."""
    seconds: float
    """Until the deadline."""


class LandBucket(TypedDict):
    """Has a worker land what is in a slot."""

    version: int
    bucket: int
    digests: list[int]
    """The trainers', over their own parameters, by group of pieces (`plan.SyncPlan.groups`)."""


class FinishSync(TypedDict):
    """Closes a sync in a worker."""

    version: int
    names: list[str]
    """Names of all tensors, in the order in which they landed."""


class WorkerReport(TypedDict):
    """Common part of every answer of a worker."""

    seconds: dict[str, float]
    """By part: `begin`, `land`, `repack`, `finish`."""


class BucketReport(WorkerReport):
    """Report of a worker on a bucket that it landed."""

    names: list[str]
    digests: list[int | None]
    """By group, of what landed; None for one that this worker has no part of."""
    untaken: list[int]
    """Numbers of the pieces, counted as in `Checksums`, that this worker has no part of."""
    checksums: Checksums
    """Only where a digest is not the trainer's: of what landed."""


class FinishReport(WorkerReport):
    """Report of a worker on its weights at the end."""

    version: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's answer where it failed."""

    reason: str
