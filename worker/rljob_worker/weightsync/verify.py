"""What an engine must have reported before its weights count: every name once, and the trainers' checksums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rljob_worker.weightsync.errors import WeightSyncError
from rljob_worker.weightsync.plan import Bucket, PlacedTensor, SyncPlan
from rljob_worker.weightsync.protocol import Checksums


class Coverage:
    """Which tensors have reached the loader of every worker of an engine."""

    def __init__(self, plan: SyncPlan, version: int) -> None:
        self._plan, self._version = plan, version
        self._landed: list[str] = []

    def landed(self, bucket: Bucket, checksums: Checksums, reports: Sequence[Mapping[str, Any]]) -> None:
        """Check what the workers say about one bucket.

        Args:
            bucket: the one that was landed.
            checksums: the trainers', over their own parameters.
            reports: one for each worker: `names` given to the loader in order, `checksums` of the bytes given to it.

        Raises:
            WeightSyncError: names the version, the bucket and the tensor.
        """
        where = f"version {self._version}, bucket {bucket.index}"
        if not reports:
            raise WeightSyncError(f"{where}: no worker of the engine reported")
        names = [tensor.name for tensor in bucket.tensors]
        for worker, report in enumerate(reports):
            loaded = list(report["names"])
            if loaded != names:
                odd = next((name for name in names if loaded.count(name) != 1), "their order")
                raise WeightSyncError(
                    f"{where}: worker {worker} was given {len(loaded)} of {len(names)} tensors: {odd}"
                )
            for tensor, expected, actual in zip(bucket.tensors, checksums, report["checksums"], strict=True):
                compare_checksums(tensor, expected, actual, f"{where}, worker {worker}")
        self._landed += names

    def finish(self) -> None:
        """Every name of the plan has landed exactly once; else WeightSyncError."""
        expected = self._plan.names
        if tuple(self._landed) == expected:
            return
        counts = {name: self._landed.count(name) for name in {*expected, *self._landed}}
        wrong = {name: count for name, count in counts.items() if count != 1 or name not in expected}
        name, count = next(iter(wrong.items()), ("order of tensors", 0))
        raise WeightSyncError(f"version {self._version}: {name} landed {count} times; {len(wrong)} tensors are wrong")


def compare_checksums(tensor: PlacedTensor, expected: Sequence[int], actual: Sequence[int], where: str) -> None:
    """WeightSyncError naming the tensor and the piece when a checksum differs."""
    for piece, theirs, ours in zip(tensor.pieces, expected, actual, strict=True):
        if theirs != ours:
            raise WeightSyncError(
                f"{where}: {tensor.name}, piece of trainer-{piece.producer} from {piece.start}: checksum "
                f"{ours:#018x} of what was given to the loader, {theirs:#018x} of the trainer's parameter"
            )
