"""The rules of a sync as state without sockets: what each side may do next, and what it takes from the others.

    engine                      trainers
      ready(plan)        ->       all engines are there and work by the same plan
                                  for each bucket i: wait until all engines acknowledged i - 2, write, then
      land i             <-         filled(i, places, dtypes and checksums of the own pieces)
      acknowledge i      ->
      done(version)      ->       after the engine's own verification of the whole
      version advances   <-       commit(version), from every trainer, when all engines are done

Anything else, in another order or twice, fails the sync.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rljob_worker.weightsync.errors import WeightSyncError
from rljob_worker.weightsync.mailbox import Message, consumer_name, producer_name
from rljob_worker.weightsync.plan import Bucket, PlacedPiece, PlacedTensor, SyncPlan
from rljob_worker.weightsync.slots import SLOT_COUNT

READY, FILLED, ACKNOWLEDGED, DONE, COMMIT = "ready", "filled", "acknowledged", "done", "commit"

Checksums = list[list[int]]
"""[tensor of the bucket][piece of the tensor]."""


def describe_piece(tensor: PlacedTensor, piece: PlacedPiece, dtype: str, checksum: int) -> dict[str, Any]:
    """How a trainer reports a piece it wrote."""
    place = {"dim": piece.dim, "start": piece.start, "length": piece.length}
    return {"name": tensor.name, "shape": list(tensor.shape), "dtype": dtype, **place, "checksum": checksum}


class ProducerState:
    """A trainer's view of one sync."""

    def __init__(self, plan: SyncPlan, version: int) -> None:
        self._plan, self._version = plan, version
        self._ready: set[int] = set()
        self._done: set[int] = set()
        self._acknowledged = dict.fromkeys(range(plan.consumers), 0)

    def take(self, message: Message) -> None:
        """Account for a message from an engine; WeightSyncError when it may not come now."""
        consumer = _number(message, consumer_name, range(self._plan.consumers))
        if message.kind == READY:
            _same_plan(message, self._plan)
            _same_version(message, self._version)
            self._once(message, consumer, self._ready)
        elif consumer not in self._ready:
            raise WeightSyncError(f"{message.sender} sent {message.kind} before {READY}")
        elif message.kind == ACKNOWLEDGED:
            expected = self._acknowledged[consumer]
            if message.body.get("bucket") != expected:
                raise WeightSyncError(
                    f"{message.sender} acknowledged bucket {message.body.get('bucket')}, expected {expected}"
                )
            self._acknowledged[consumer] += 1
        elif message.kind == DONE:
            _same_version(message, self._version)
            if self._acknowledged[consumer] != len(self._plan.buckets):
                raise WeightSyncError(f"{message.sender} says done before it acknowledged all buckets")
            self._once(message, consumer, self._done)
        else:
            raise WeightSyncError(f"{message.sender} sent {message.kind}, which no engine sends")

    def _once(self, message: Message, consumer: int, seen: set[int]) -> None:
        if consumer in seen:
            raise WeightSyncError(f"{message.sender} sent {message.kind} twice")
        seen.add(consumer)

    def blocking(self, bucket: int) -> list[str]:
        """Engines that have to act before the slot of `bucket` may be written; none: it may be."""
        free = bucket - SLOT_COUNT + 1
        return [
            consumer_name(consumer)
            for consumer, acknowledged in self._acknowledged.items()
            if consumer not in self._ready or acknowledged < free
        ]

    def not_done(self) -> list[str]:
        """Engines that have not verified the whole yet."""
        return [consumer_name(consumer) for consumer in self._acknowledged if consumer not in self._done]


class ConsumerState:
    """An engine's view of one sync."""

    def __init__(self, plan: SyncPlan, version: int) -> None:
        self._plan, self._version = plan, version
        self._own = {p: [b.index for b in plan.buckets if p in b.producers()] for p in plan.producers}
        self._filled = dict.fromkeys(plan.producers, 0)
        self._checksums: dict[int, dict[tuple[str, PlacedPiece], int]] = {}
        self._landed = 0
        self._committed: set[int] = set()

    def take(self, message: Message) -> None:
        """Account for a message from a trainer; WeightSyncError when it may not come now or says what it must not."""
        producer = _number(message, producer_name, self._plan.producers)
        if message.kind == FILLED:
            self._take_filled(message, producer)
        elif message.kind == COMMIT:
            _same_version(message, self._version)
            if self.bucket() is not None or producer in self._committed:
                raise WeightSyncError(f"{message.sender} committed twice, or before all buckets landed")
            self._committed.add(producer)
        else:
            raise WeightSyncError(f"{message.sender} sent {message.kind}, which no trainer sends")

    def _take_filled(self, message: Message, producer: int) -> None:
        _same_plan(message, self._plan)
        _same_version(message, self._version)
        own, index = self._own[producer], message.body.get("bucket")
        count = self._filled[producer]
        expected = own[count] if count < len(own) else None
        if index != expected or expected is None:
            raise WeightSyncError(f"{message.sender} filled bucket {index}, expected bucket {expected}")
        if expected >= self._landed + SLOT_COUNT:
            raise WeightSyncError(f"{message.sender} filled bucket {index} while its slot was in use")
        sums = self._checksums.setdefault(expected, {})
        _check_pieces(message, self._plan, self._plan.buckets[expected], producer, sums)
        self._filled[producer] = count + 1

    def bucket(self) -> Bucket | None:
        """The bucket to land next; None when all have landed."""
        return self._plan.buckets[self._landed] if self._landed < len(self._plan.buckets) else None

    def missing(self) -> list[str]:
        """Trainers that have yet to fill the bucket to land next."""
        bucket = self.bucket()
        if bucket is None:
            return []
        return [
            producer_name(producer)
            for producer in sorted(bucket.producers())
            if bucket.index in self._own[producer][self._filled[producer] :]
        ]

    def checksums(self) -> Checksums:
        """What the trainers found in the parameters behind the bucket to land next."""
        bucket = self.bucket()
        assert bucket is not None
        sums = self._checksums[bucket.index]
        return [[sums[tensor.name, piece] for piece in tensor.pieces] for tensor in bucket.tensors]

    def landed(self) -> None:
        """The bucket is in the engine and verified."""
        self._checksums.pop(self._landed)
        self._landed += 1

    def not_committed(self) -> list[str]:
        """Trainers that have not said yet that all engines are done."""
        return [producer_name(producer) for producer in self._plan.producers if producer not in self._committed]


def _check_pieces(
    message: Message, plan: SyncPlan, bucket: Bucket, producer: int, sums: dict[tuple[str, PlacedPiece], int]
) -> None:
    where = f"bucket {bucket.index} from {message.sender}"
    reported = message.body.get("pieces")
    if not isinstance(reported, list):
        raise WeightSyncError(f"{where} lists no pieces")
    expected = list(bucket.pieces_of(producer))
    for position, (tensor, piece) in enumerate(expected):
        if position >= len(reported):
            raise WeightSyncError(f"{where}: {tensor.name} is missing")
        checksum = reported[position].get("checksum")
        wanted = describe_piece(tensor, piece, plan.dtype, checksum)
        for key, value in wanted.items():
            if reported[position].get(key) != value:
                raise WeightSyncError(
                    f"{where}: {tensor.name}: {key} is {reported[position].get(key)!r}, expected {value!r}"
                )
        if not isinstance(checksum, int):
            raise WeightSyncError(f"{where}: {tensor.name} has no checksum")
        sums[tensor.name, piece] = checksum
    if len(reported) > len(expected):
        raise WeightSyncError(f"{where}: {reported[len(expected)].get('name')} is not expected, or came twice")


def _number(message: Message, name_of: Any, numbers: Iterable[int]) -> int:
    for number in numbers:
        if name_of(number) == message.sender:
            return number
    raise WeightSyncError(f"{message.sender} sent {message.kind}, but takes no part on that side")


def _same_plan(message: Message, plan: SyncPlan) -> None:
    if message.body.get("plan") != plan.fingerprint:
        raise WeightSyncError(
            f"{message.sender} works by another plan: {message.body.get('plan')}, not {plan.fingerprint}"
        )


def _same_version(message: Message, version: int) -> None:
    if message.body.get("version") != version:
        raise WeightSyncError(f"{message.sender} is at version {message.body.get('version')}, expected {version}")
