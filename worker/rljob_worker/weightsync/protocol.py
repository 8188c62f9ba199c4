"""The rules of a sync as state without sockets: what each side may do next, and what it takes from the others.

    engine                      trainers
      ready(plan)        ->       all engines are there and work by the same plan
                                  for each bucket i: wait until all engines acknowledged i - 2, write, then
      land i             <-         filled(i, digests of the own pieces); over the network the first trainer gets it
                                    too, and sends the slot to all engines before it says it
      doubt i            ->       only where a digest differs: which piece is it?
      (fails)            <-         sums(i, checksum of each own piece)
      acknowledge i      ->
      done(version)      ->       after the engine's own verification of the whole
      version advances   <-       commit(version), from every trainer, when all engines are done

Anything else, in another order or twice, fails the sync.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rljob_worker.errors import WeightSyncError
from rljob_worker.weightsync.mailbox import Message, engine_name, trainer_name
from rljob_worker.weightsync.messages import BucketReport, Checksums
from rljob_worker.weightsync.plan import Bucket, Group, Placed, SyncPlan
from rljob_worker.weightsync.slots import SLOT_COUNT

READY, FILLED, ACKNOWLEDGED, DONE, COMMIT = "ready", "filled", "acknowledged", "done", "commit"
DOUBTED, SUMS = "doubted", "sums"


class TrainerState:
    """A trainer's view of one sync."""

    def __init__(self, plan: SyncPlan, version: int) -> None:
        self._plan, self._version = plan, version
        self._ready: set[int] = set()
        self._done: set[int] = set()
        self._acknowledged = dict.fromkeys(range(plan.engines), 0)
        self._filled: dict[str, set[int]] = {trainer_name(trainer): set() for trainer in plan.trainers}

    def take(self, message: Message) -> int | None:
        """Account for a message from an engine, or another trainer; WeightSyncError when it may not come now.

        Returns:
            The bucket of whose pieces the engine wants the sums; None: of none.
        """
        if message.sender in self._filled:
            self._take_filled(message)
            return None
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
        elif message.kind == DOUBTED:
            bucket = self._acknowledged[engine]
            if message.body.get("bucket") != bucket or bucket == len(self._plan.buckets):
                raise WeightSyncError(f"{message.sender} doubts bucket {message.body.get('bucket')}, expected {bucket}")
            return bucket
        elif message.kind == DONE:
            _same_version(message, self._version)
            if self._acknowledged[engine] != len(self._plan.buckets):
                raise WeightSyncError(f"{message.sender} says done before it acknowledged all buckets")
            self._once(message, engine, self._done)
        else:
            raise WeightSyncError(f"{message.sender} sent {message.kind}, which no engine sends")
        return None

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
        others = (trainer_name(trainer) for trainer in self._plan.writers[bucket.index] if trainer != own)
        return [name for name in others if bucket.index not in self._filled[name]]

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
        self._filled = dict.fromkeys(plan.trainers, 0)
        self._digests: dict[int, dict[int, int]] = {}
        """Bucket -> number of a group of its pieces -> the trainer's digest."""
        self._doubted: dict[int, list[int] | None] = {}
        """Trainers -> the sums of their pieces of the bucket to land next, once they said them."""
        self._landed = 0
        self._committed: set[int] = set()

    def take(self, message: Message) -> None:
        """Account for a message from a trainer; WeightSyncError when it may not come now or says what it must not."""
        trainer = _number(message, trainer_name, self._plan.trainers)
        if message.kind == FILLED:
            self._take_filled(message, trainer)
        elif message.kind == SUMS:
            self._take_sums(message, trainer)
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
        own, index = self._plan.buckets_of[trainer], message.body.get("bucket")
        count = self._filled[trainer]
        expected = own[count] if count < len(own) else None
        if index != expected or expected is None:
            raise WeightSyncError(f"{message.sender} filled bucket {index}, expected bucket {expected}")
        if expected >= self._landed + SLOT_COUNT:
            raise WeightSyncError(f"{message.sender} filled bucket {index} while its slot was in use")
        groups = [
            (number, group) for number, group in enumerate(self._plan.groups[expected]) if group.trainer == trainer
        ]
        digests = _numbers(message, "digests", [group.pieces for _, group in groups])
        known = self._digests.setdefault(expected, {})
        known.update((number, digest) for (number, _), digest in zip(groups, digests, strict=True))
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
            for trainer in self._plan.writers[bucket.index]
            if self._filled[trainer] <= self._plan.buckets_of[trainer].index(bucket.index)
        ]

    def digests(self) -> list[int]:
        """The trainers' digests of the parameters behind the bucket to land next, by group."""
        bucket = self.bucket()
        assert bucket is not None
        known = self._digests[bucket.index]
        return [known[number] for number in range(len(self._plan.groups[bucket.index]))]

    def doubt(self, trainers: Iterable[int]) -> None:
        """These are asked for the sums of their pieces of the bucket to land next."""
        self._doubted = dict.fromkeys(trainers)

    def silent(self) -> list[str]:
        """Trainers that have yet to say the sums they were asked for."""
        return [trainer_name(trainer) for trainer, sums in self._doubted.items() if sums is None]

    def sums(self, trainer: int) -> list[int]:
        """The answer of a trainer that was asked."""
        return self._doubted[trainer] or []

    def _take_sums(self, message: Message, trainer: int) -> None:
        bucket = self.bucket()
        asked = bucket is not None and self._doubted.get(trainer, []) is None
        if bucket is None or not asked or message.body.get("bucket") != bucket.index:
            raise WeightSyncError(f"{message.sender} sent {SUMS}, for which nobody asked")
        pieces = [((tensor, piece),) for tensor, piece in bucket.pieces_of(trainer)]
        self._doubted[trainer] = _numbers(message, "sums", pieces)

    def landed(self) -> None:
        """The bucket is in the engine and verified."""
        self._digests.pop(self._landed)
        self._landed += 1

    def not_committed(self) -> list[str]:
        """Trainers that have not said yet that all engines are done."""
        return [trainer_name(trainer) for trainer in self._plan.trainers if trainer not in self._committed]


def _numbers(message: Message, what: str, pieces: Sequence[Sequence[Placed]]) -> list[int]:
    """The numbers that a message has under a name: one for each of these groups of pieces."""
    where = f"bucket {message.body.get('bucket')} from {message.sender}"
    numbers = message.body.get(what)
    if not isinstance(numbers, list):
        raise WeightSyncError(f"{where} has no {what}")
    if len(numbers) != len(pieces):
        raise WeightSyncError(f"{where} has {len(numbers)} {what}, expected {len(pieces)}")
    for number, group in zip(numbers, pieces, strict=True):
        if not isinstance(number, int) or isinstance(number, bool):
            names = ", ".join(dict.fromkeys(tensor.name for tensor, _ in group))
            raise WeightSyncError(f"{where}: {number!r} is no checksum; of {names}")
    return numbers


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


@dataclass(frozen=True, slots=True)
class Doubt:
    """A group of pieces whose digest in a worker is not the trainer's."""

    worker: int
    group: Group
    theirs: int
    ours: int


class Coverage:
    """The tensors that have reached the loader of every worker of an engine."""

    def __init__(self, plan: SyncPlan, version: int) -> None:
        self._plan, self._version = plan, version
        self._landed: list[tuple[str, int]] = []

    def landed(self, bucket: Bucket, digests: Sequence[int], reports: Sequence[BucketReport]) -> list[Doubt]:
        """Check what the workers say about one bucket.

        Args:
            bucket: the one that was landed.
            digests: the trainers', over their own parameters, by group.
            reports: one for each worker.

        Returns:
            What differs from the trainers' digests; the bucket counts only where nothing does.

        Raises:
            WeightSyncError: names the version, the bucket and the tensor.
        """
        where = f"version {self._version}, bucket {bucket.index}"
        if not reports:
            raise WeightSyncError(f"{where}: no worker of the engine reported")
        names = self._plan.names_in[bucket.index]
        for worker, report in enumerate(reports):
            loaded = report["names"]
            if loaded != names:
                odd = next((name for name in names if loaded.count(name) != 1), "their order")
                raise WeightSyncError(
                    f"{where}: worker {worker} was given {len(loaded)} of {len(names)} tensors: {odd}"
                )
        untaken = set.intersection(*(set(report["untaken"]) for report in reports))
        if untaken:
            everything = [(tensor, piece) for tensor in bucket.tensors for piece in tensor.pieces]
            tensor, piece = everything[min(untaken)]
            raise WeightSyncError(
                f"{where}: {tensor.name}, piece of trainer-{piece.trainer} from {piece.part.start}: no worker "
                "of the engine took it"
            )
        doubts = [
            Doubt(worker, self._plan.groups[bucket.index][number], theirs, ours)
            for worker, report in enumerate(reports)
            for number, (theirs, ours) in enumerate(zip(digests, report["digests"], strict=True))
            if ours is not None and ours != theirs
        ]
        if not doubts:
            self._landed += self._plan.slices[bucket.index]
        return doubts

    def name(self, bucket: Bucket, doubt: Doubt, theirs: Sequence[int], checksums: Checksums) -> str:
        """Names the tensor that is wrong in a bucket.

        Args:
            bucket: the one that was landed.
            doubt: what differs.
            theirs: the sums of the trainer's pieces of the bucket.
            checksums: those of the worker that doubts.
        """
        where = f"version {self._version}, bucket {bucket.index}, worker {doubt.worker}"
        own = dict(zip(bucket.pieces_of(doubt.group.trainer), theirs, strict=True))
        everything = [(tensor, piece) for tensor in bucket.tensors for piece in tensor.pieces]
        landed = dict(zip(everything, checksums, strict=True))
        for placed in doubt.group.pieces:
            if own[placed] != landed[placed]:
                tensor, piece = placed
                return (
                    f"{where}: {tensor.name}, piece of trainer-{piece.trainer} from {piece.part.start}: checksum "
                    f"{landed[placed]:#018x} of what landed, {own[placed]:#018x} of the trainer's parameter"
                )
        names = ", ".join(dict.fromkeys(tensor.name for tensor, _ in doubt.group.pieces))
        return (
            f"{where}: checksum {doubt.ours:#018x} of what landed, {doubt.theirs:#018x} of the parameters of "
            f"trainer-{doubt.group.trainer}, though those of its tensors, taken again, agree: one of {names} was wrong "
            "when it was summed"
        )

    def finish(self) -> None:
        """Every slice of the plan has landed exactly once; else WeightSyncError."""
        expected = [place for places in self._plan.slices for place in places]
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
