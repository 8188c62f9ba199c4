"""The rules of a sync as state without sockets: what each side may do next, and what it takes from the others.

    engine                      trainers
      ready(plan)        ->       all engines are there and work by the same plan
                                  for each bucket i: wait until all engines acknowledged i - 2, write, then
      land i             <-         filled(i, places, dtypes and checksums of the own pieces); over the network the
                                    first trainer is told so too, and sends the slot to all engines before it says it
      acknowledge i      ->
      done(version)      ->       after the engine's own verification of the whole
      version advances   <-       commit(version), from every trainer, when all engines are done

Anything else, in another order or twice, fails the sync.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from rljob_worker.errors import WeightSyncError
from rljob_worker.weightsync.mailbox import Message, engine_name, trainer_name
from rljob_worker.weightsync.messages import BucketReport, Checksums
from rljob_worker.weightsync.plan import Bucket, PlacedPiece, SyncPlan
from rljob_worker.weightsync.slots import SLOT_COUNT

READY, FILLED, ACKNOWLEDGED, DONE, COMMIT = "ready", "filled", "acknowledged", "done", "commit"


class TrainerState:
    """A trainer's view of one sync."""

    def __init__(self, plan: SyncPlan, version: int) -> None:
        self._plan, self._version = plan, version
        self._ready: set[int] = set()
        self._done: set[int] = set()
        self._acknowledged = dict.fromkeys(range(plan.engines), 0)
        self._filled: dict[str, set[int]] = {trainer_name(trainer): set() for trainer in plan.trainers}

    def take(self, message: Message) -> None:
        """Account for a message from an engine, or another trainer; WeightSyncError when it may not come now."""
        if message.sender in self._filled:
            self._take_filled(message)
            return
        engine = _number(message, engine_name, range(self._plan.engines))
        if message.kind == READY:
            _same_plan(message, self._plan)
            _same_version(message, self._version)
            self._once(message, engine, self._ready)
        elif engine not in self._ready:
            raise WeightSyncError(f"{message.sender} sent {message.kind} before {READY}")
        elif message.kind == ACKNOWLEDGED:
            expected = self._acknowledged[engine]
            if message.body.get("bucket") != expected:
                raise WeightSyncError(
                    f"{message.sender} acknowledged bucket {message.body.get('bucket')}, expected {expected}"
                )
            self._acknowledged[engine] += 1
        elif message.kind == DONE:
            _same_version(message, self._version)
            if self._acknowledged[engine] != len(self._plan.buckets):
                raise WeightSyncError(f"{message.sender} says done before it acknowledged all buckets")
            self._once(message, engine, self._done)
        else:
            raise WeightSyncError(f"{message.sender} sent {message.kind}, which no engine sends")

    def _take_filled(self, message: Message) -> None:
        if message.kind != FILLED:
            raise WeightSyncError(f"{message.sender} sent {message.kind}, which no trainer sends to another")
        _same_plan(message, self._plan)
        _same_version(message, self._version)
        bucket = message.body.get("bucket")
        assert isinstance(bucket, int)
        self._filled[message.sender].add(bucket)

    def unfilled(self, bucket: Bucket, own: int) -> list[str]:
        """Other trainers than `own` that have yet to fill a bucket."""
        others = sorted(bucket.trainers() - {own})
        return [name for name in map(trainer_name, others) if bucket.index not in self._filled[name]]

    def _once(self, message: Message, engine: int, seen: set[int]) -> None:
        if engine in seen:
            raise WeightSyncError(f"{message.sender} sent {message.kind} twice")
        seen.add(engine)

    def blocking(self, bucket: int) -> list[str]:
        """Engines that have to act before the slot of `bucket` may be written; none: it may be."""
        free = bucket - SLOT_COUNT + 1
        return [
            engine_name(engine)
            for engine, acknowledged in self._acknowledged.items()
            if engine not in self._ready or acknowledged < free
        ]

    def not_done(self) -> list[str]:
        """Engines that have not verified the whole yet."""
        return [engine_name(engine) for engine in self._acknowledged if engine not in self._done]


class EngineState:
    """An engine's view of one sync."""

    def __init__(self, plan: SyncPlan, version: int) -> None:
        self._plan, self._version = plan, version
        self._own = {p: [b.index for b in plan.buckets if p in b.trainers()] for p in plan.trainers}
        self._filled = dict.fromkeys(plan.trainers, 0)
        self._checksums: dict[int, dict[tuple[str, PlacedPiece], int]] = {}
        self._landed = 0
        self._committed: set[int] = set()

    def take(self, message: Message) -> None:
        """Account for a message from a trainer; WeightSyncError when it may not come now or says what it must not."""
        trainer = _number(message, trainer_name, self._plan.trainers)
        if message.kind == FILLED:
            self._take_filled(message, trainer)
        elif message.kind == COMMIT:
            _same_version(message, self._version)
            if self.bucket() is not None or trainer in self._committed:
                raise WeightSyncError(f"{message.sender} committed twice, or before all buckets landed")
            self._committed.add(trainer)
        else:
            raise WeightSyncError(f"{message.sender} sent {message.kind}, which no trainer sends")

    def _take_filled(self, message: Message, trainer: int) -> None:
        _same_plan(message, self._plan)
        _same_version(message, self._version)
        own, index = self._own[trainer], message.body.get("bucket")
        count = self._filled[trainer]
        expected = own[count] if count < len(own) else None
        if index != expected or expected is None:
            raise WeightSyncError(f"{message.sender} filled bucket {index}, expected bucket {expected}")
        if expected >= self._landed + SLOT_COUNT:
            raise WeightSyncError(f"{message.sender} filled bucket {index} while its slot was in use")
        sums = self._checksums.setdefault(expected, {})
        _check_pieces(message, self._plan, self._plan.buckets[expected], trainer, sums)
        self._filled[trainer] = count + 1

    def bucket(self) -> Bucket | None:
        """The bucket to land next; None when all have landed."""
        return self._plan.buckets[self._landed] if self._landed < len(self._plan.buckets) else None

    def missing(self) -> list[str]:
        """Trainers that have yet to fill the bucket to land next."""
        bucket = self.bucket()
        if bucket is None:
            return []
        return [
            trainer_name(trainer)
            for trainer in sorted(bucket.trainers())
            if bucket.index in self._own[trainer][self._filled[trainer] :]
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
        return [trainer_name(trainer) for trainer in self._plan.trainers if trainer not in self._committed]


def _check_pieces(
    message: Message, plan: SyncPlan, bucket: Bucket, trainer: int, sums: dict[tuple[str, PlacedPiece], int]
) -> None:
    where = f"bucket {bucket.index} from {message.sender}"
    reported = message.body.get("pieces")
    if not isinstance(reported, list):
        raise WeightSyncError(f"{where} lists no pieces")
    expected = list(bucket.pieces_of(trainer))
    for position, (tensor, piece) in enumerate(expected):
        if position >= len(reported):
            raise WeightSyncError(f"{where}: {tensor.name} is missing")
        checksum = reported[position].get("checksum")
        wanted = tensor.report(piece, plan.dtype, checksum)
        for key, value in wanted.items() if reported[position] != wanted else ():
            if reported[position].get(key) != value:
                raise WeightSyncError(
                    f"{where}: {tensor.name}: {key} is {reported[position].get(key)!r}, expected {value!r}"
                )
        if not isinstance(checksum, int):
            raise WeightSyncError(f"{where}: {tensor.name} has no checksum")
        sums[tensor.name, piece] = checksum
    if len(reported) > len(expected):
        raise WeightSyncError(f"{where}: {reported[len(expected)].get('name')} is not expected, or came twice")


def _number(message: Message, name_of: Callable[[int], str], numbers: Iterable[int]) -> int:
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


class Coverage:
    """Which tensors have reached the loader of every worker of an engine."""

    def __init__(self, plan: SyncPlan, version: int) -> None:
        self._plan, self._version = plan, version
        self._landed: list[tuple[str, int]] = []

    def landed(self, bucket: Bucket, checksums: Checksums, reports: Sequence[BucketReport]) -> None:
        """Check what the workers say about one bucket.

        Args:
            bucket: the one that was landed.
            checksums: the trainers', over their own parameters.
            reports: one for each worker: `names` in the order in which they landed, `checksums` of what landed, None
                for a piece that another worker takes.

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
                tensor.compare(expected, actual, f"{where}, worker {worker}")
        for position, tensor in enumerate(bucket.tensors):
            landed = [report["checksums"][position] for report in reports]
            for piece, sums in zip(tensor.pieces, zip(*landed, strict=True), strict=True):
                if all(checksum is None for checksum in sums):
                    raise WeightSyncError(
                        f"{where}: {tensor.name}, piece of trainer-{piece.trainer} from {piece.part.start}: no worker "
                        "of the engine took it"
                    )
        self._landed += [(tensor.name, tensor.first) for tensor in bucket.tensors]

    def finish(self) -> None:
        """Every slice of the plan has landed exactly once; else WeightSyncError."""
        expected = [(tensor.name, tensor.first) for bucket in self._plan.buckets for tensor in bucket.tensors]
        if self._landed == expected:
            return
        landed, wanted = Counter(self._landed), Counter(expected)
        wrong = [(name, landed[name, first]) for name, first in {**wanted, **landed} if landed[name, first] != 1]
        name, count = wrong[0] if wrong else ("order of tensors", 0)
        raise WeightSyncError(f"version {self._version}: {name} landed {count} times; {len(wrong)} slices are wrong")


def later_version(version: int, last: int | None) -> int:
    """`version`, which tells the messages of one sync from those of another; ValueError when it is not after `last`."""
    if last is not None and version <= last:
        raise ValueError(f"version {version} is not greater than {last}, the version of the sync before")
    return version
