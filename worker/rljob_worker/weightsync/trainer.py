"""A trainer's side of the weight sync."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from rljob_worker.devices.threads import half_the_threads
from rljob_worker.errors import WeightSyncError
from rljob_worker.tensor_slice import TensorSlice
from rljob_worker.types import TrainerReport
from rljob_worker.weightsync import mailbox
from rljob_worker.weightsync.device_ipc import Digests, Exchange
from rljob_worker.weightsync.mailbox import Message, engine_name, trainer_name
from rljob_worker.weightsync.plan import Bucket, PlacedPiece, PlacedTensor, SyncPlan
from rljob_worker.weightsync.protocol import COMMIT, FILLED, SUMS, TrainerState, later_version
from rljob_worker.weightsync.route import Route
from rljob_worker.weightsync.slots import SLOT_COUNT, Batch, Move, Slots


class Piece(Protocol):
    """A slice of a tensor with its data, as `tensor_slice.Piece`."""

    @property
    def place(self) -> TensorSlice:
        """The slice."""
        ...

    def read(self) -> torch.Tensor:
        """The data in HF layout, on the trainer's device."""
        ...

    @property
    def view(self) -> Callable[[], torch.Tensor] | None:
        """Gives the same as a view of the parameter, whose first dimension may be two; None where it is computed."""
        ...

    def address(self) -> int:
        """Address of the parameter in memory now."""
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a bucket that one rank writes."""

    batches: dict[int, Batch]
    """By number of the group of pieces."""
    nbytes: int
    pieces: int
    tensors: frozenset[str]
    """Names."""


class HeldPieces:
    """The pieces that a rank sends by a plan.

    Raises:
        ValueError: the plan gives it a piece to send that it does not hold.
    """

    def __init__(self, number: int, pieces: Sequence[Piece], plan: SyncPlan) -> None:
        self.number = number
        self._held: dict[str, list[Piece]] = {}
        for piece in pieces:
            self._held.setdefault(piece.place.hf_name, []).append(piece)
        self._sources = {
            (tensor.name, tensor.first, piece.part): self._source(tensor, piece)
            for bucket in plan.buckets
            for tensor, piece in bucket.pieces_of(number)
        }
        self._last: tuple[Piece, torch.Tensor] | None = None
        holders = {id(holder): holder for holder, _ in self._sources.values()}
        self._places = [holder.address for holder in holders.values()]
        self.addresses: list[int] = []
        """Addresses of the parameters when they were looked for last."""
        self.kept: dict[int, Share] = {}
        """Bucket -> what this rank writes into it, where that is found once for all syncs."""

    def look_for_parameters(self) -> None:
        """Find everything again when a parameter is no longer where it was."""
        addresses = [place() for place in self._places]
        if addresses != self.addresses:
            self.kept.clear()
            self.addresses = addresses

    def read(self, tensor: PlacedTensor, piece: PlacedPiece) -> torch.Tensor:
        """A piece's data; its first dimension may be several, where the parameter has its rows in groups."""
        holder, rows = self._sources[tensor.name, tensor.first, piece.part]
        if holder.view is not None and rows == slice(0, holder.place.shape[0]):
            return holder.view()
        if self._last is None or self._last[0] is not holder:
            # Some shards are put together to be read, and slices of one follow each other.
            self._last = (holder, holder.read())
        return self._last[1][rows]

    def is_view(self, tensor: PlacedTensor, piece: PlacedPiece) -> bool:
        """Whether `read` gives a view of the parameter, which has the next version's values too."""
        holder, rows = self._sources[tensor.name, tensor.first, piece.part]
        if holder.view is None:
            return False
        if rows == slice(0, holder.place.shape[0]):
            return True
        return self.read(tensor, piece).untyped_storage().data_ptr() == holder.view().untyped_storage().data_ptr()

    def view(self, tensor: PlacedTensor, piece: PlacedPiece) -> torch.Tensor | None:
        """See `slots.Held`."""
        for holder in self._held.get(tensor.name, ()):
            rows = tensor.rows_in(piece, holder.place.part)
            if holder.view is not None and rows == slice(0, holder.place.shape[0]):
                return holder.view()
        return None

    def forget(self) -> None:
        """Drop what was read last: it is no view of the parameter, which will change."""
        self._last = None

    def _source(self, tensor: PlacedTensor, piece: PlacedPiece) -> tuple[Piece, slice]:
        for holder in self._held.get(tensor.name, ()):
            rows = tensor.rows_in(piece, holder.place.part)
            if rows is not None:
                return holder, rows
        raise ValueError(
            f"rank {self.number} has to send {tensor.name} from {tensor.first + piece.part.start}, but has it not"
        )


class WeightSyncTrainer:
    """Writes this rank's pieces into the slots, bucket by bucket, once all engines have room.

    All ranks build the same plan (gather `piece.place` of the primary pieces over the ranks) and then:

        sync = WeightSyncTrainer(pieces, plan, trainer=rank, route=HostRoute(sync_folder))
        report = sync.update_weights(version, deadline=60.0)

    In host memory all ranks write into the same slots, and one that the plan gives nothing to send has nothing to do:
    `update_weights` returns at once. On accelerators each rank fills the slots of its own device, with the other ranks'
    pieces too, and `update_weights` is collective. So it is where a model's pieces lie on several hosts: each host's
    slots get those of the others too, and its first trainer reports them to the engines there.

    Without slots, engines copy from the parameters, which each rank shares when it is made: what it fills is summed
    alone.

    Where the route delivers, the engines have slots of their own: the first sending trainer brings each bucket to them
    once it is filled.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        plan: SyncPlan,
        *,
        trainer: int,
        route: Route,
        exchange: Exchange | None = None,
    ) -> None:
        """Bind the socket; the lowest sending rank also tells the others the plan, and makes the slots in host memory.

        Args:
            pieces: what this rank holds; of tensors that others send too, the plan names the sender.
            plan: the same on all ranks.
            trainer: this rank's number in the plan.
            route: the job's.
            exchange: the trainers that fill each other's slots; None: all write into those of the host.

        Raises:
            ValueError: a piece that the plan gives to this rank is not in `pieces`, or the folder's path is too long.
            WeightSyncError: no room for the slots.
            OSError: the route's port is taken.
        """
        self.whole_plan, self.plan = (plan, plan) if exchange is None else exchange.plans(plan)
        self.exchange = exchange
        self.rank = HeldPieces(trainer, pieces, self.whole_plan)
        self.delivers = route.delivers
        self.end = route.make_sender(trainer, self.plan, exchange, self.rank)
        self._last_version: int | None = None

    def update_weights(self, version: int, deadline: float) -> TrainerReport:
        """Hand the weights over to all engines; returns when every engine has verified them.

        Args:
            version: the version these weights are, greater than all before it; engines take it on.
            deadline: seconds from now by which it must be over.

        Returns:
            What this rank sent, and its seconds.

        Raises:
            ValueError: the version is not greater than the one before.
            WeightSyncError: what went wrong on this or another side, naming the party, the version and the bucket.
        """
        self._last_version = later_version(version, self._last_version)
        if self.end.mailbox is None and self.exchange is None:
            return {"version": version, "bytes": 0, "staging_bytes": 0, "tensors": 0, "pieces": 0, "seconds": 0.0}
        until = time.monotonic() + deadline
        self.rank.look_for_parameters()
        run = _Update(self, version, until)
        what = f"sending version {version}"
        with (
            mailbox.end_for_all(what, lambda: run.doing, lambda reason: self._abort(version, reason)),
            half_the_threads(),
        ):
            try:
                return run(self.end.slots(until))
            except BaseException:
                self.end.abandon()
                raise
            finally:
                self.rank.forget()

    def close(self) -> None:
        """Close the sockets and drop the slots; the rank that made them removes them."""
        self.rank.kept.clear()
        self.end.close()

    def _abort(self, version: int, reason: str) -> None:
        if self.end.mailbox is not None:
            self.end.mailbox.abort(version, reason)


class _Update:
    """One sync, from the trainer's side."""

    def __init__(self, sync: WeightSyncTrainer, version: int, deadline: float) -> None:
        self._plan, self._whole_plan = sync.plan, sync.whole_plan
        self._rank, self._exchange, self._end = sync.rank, sync.exchange, sync.end
        self._over_network = sync.delivers
        self._version, self._deadline = version, deadline
        self._state = TrainerState(sync.plan, version)
        self._seconds = dict.fromkeys(("read", "fill", "spread", "wait", "network"), 0.0)
        self._bytes = self._pieces = 0
        self._tensors: set[str] = set()
        self.doing = "before the first bucket"

    def __call__(self, slots: Slots) -> TrainerReport:
        started = time.perf_counter()
        self._slots = slots
        for bucket, whole in zip(self._plan.buckets, self._whole_plan.buckets, strict=True):
            tells = self._rank.number in self._plan.writers[bucket.index]
            if tells or self._exchange is not None or self._end.delivers:
                self._send_bucket(bucket, whole, tells)
        self.doing = "after the last bucket"
        with self._agreeing():
            if self._end.mailbox is not None:
                self._wait(self._state.not_done, "done")
        if self._end.mailbox is not None:
            self._tell(COMMIT)
        return {
            "version": self._version,
            "bytes": self._bytes,
            "staging_bytes": self._slots.owned_bytes,
            "tensors": len(self._tensors),
            "pieces": self._pieces,
            "seconds": time.perf_counter() - started,
            "read_seconds": self._seconds["read"],
            "fill_seconds": self._seconds["fill"],
            "spread_seconds": self._seconds["spread"],
            "wait_seconds": self._seconds["wait"],
            "network_seconds": self._seconds["network"],
        }

    def _send_bucket(self, bucket: Bucket, whole: Bucket, tells: bool) -> None:
        """The bucket as the engines see it, and as all ranks do."""
        self.doing = f"bucket {bucket.index}"
        with torch.no_grad():
            with self._agreeing():
                if self._end.mailbox is not None:
                    self._wait(lambda: self._state.blocking(bucket.index), f"room for bucket {bucket.index}")
                digests = self._fill(whole)
            with self._agreeing():
                if self._exchange is not None:
                    if self._end.spreads:
                        self._broadcast(whole, self._exchange)
                    digests = self._exchange.digests(digests)
        if self._over_network:
            with self._agreeing():
                if self._end.delivers:
                    self._deliver(bucket)
        if tells:
            groups = enumerate(self._plan.groups[bucket.index])
            own = [digests[number] for number, group in groups if group.trainer == self._rank.number]
            self._tell(FILLED, plan=self._plan.fingerprint, bucket=bucket.index, digests=own)

    def _deliver(self, bucket: Bucket) -> None:
        if self._exchange is None:
            # Others write into the same slot; those of an exchange have agreed that it is full.
            others = f"bucket {bucket.index} to be filled"
            self._wait(lambda: self._state.unfilled(bucket, self._rank.number), others)
        started = time.perf_counter()
        self._end.deliver(bucket, self._version, self._deadline, self._look)
        self._seconds["network"] += time.perf_counter() - started

    def _look(self) -> None:
        """Take what has come; raise what another party ended the sync with."""
        mailbox = self._end.mailbox
        assert mailbox is not None
        while (message := mailbox.look(self._version, lambda: f"the engines to take {self.doing}")) is not None:
            self._take(message)

    def _take(self, message: Message) -> None:
        """Account for a message; to an engine that asks which piece is wrong, tell the sum of each."""
        doubted = self._state.take(message)
        if doubted is None:
            return
        bucket = self._whole_plan.buckets[doubted]
        with torch.no_grad():
            own = [self._rank.read(tensor, piece) for tensor, piece in bucket.pieces_of(self._rank.number)]
            dtype = self._plan.torch_dtype
            sums = self._slots.checksums(
                [self._slots.landing([Move(None, None, source.to(dtype))]).run() for source in own]
            )
        assert self._end.mailbox is not None
        self._end.mailbox.send([message.sender], SUMS, self._version, bucket=doubted, sums=sums)

    def _broadcast(self, bucket: Bucket, exchange: Exchange) -> None:
        started = time.perf_counter()
        exchange.broadcast(bucket, self._slots, self._plan.torch_dtype)
        self._slots.synchronize()
        self._seconds["spread"] += time.perf_counter() - started

    @contextmanager
    def _agreeing(self) -> Iterator[None]:
        """Something that no rank of the exchange goes on after when one of them failed in it."""
        try:
            yield
        except Exception as error:
            if self._exchange is not None:
                self._exchange.barrier(str(error) or repr(error))
            raise
        if self._exchange is not None:
            started = time.perf_counter()
            self._exchange.barrier()
            self._seconds["wait"] += time.perf_counter() - started

    def _tell(self, kind: str, **body: object) -> None:
        assert self._end.mailbox is not None
        engines = [engine_name(engine) for engine in range(self._plan.engines)]
        self._end.mailbox.send(engines, kind, self._version, version=self._version, **body)
        first = self._plan.trainers[0]
        if kind == FILLED and self._over_network and self._exchange is None and self._rank.number != first:
            about = {name: value for name, value in body.items() if name != "digests"}
            self._end.mailbox.send([trainer_name(first)], kind, self._version, version=self._version, **about)

    def _fill(self, bucket: Bucket) -> Digests:
        """Write this rank's share of a bucket; the digest of each of its groups, over the parameters."""
        started = time.perf_counter()
        share = self._rank.kept.get(bucket.index)
        if share is None:
            share = self._find(bucket)
            self._seconds["read"] += time.perf_counter() - started
            started = time.perf_counter()
        if not share.pieces:
            return {}
        found = self._slots.checksums([batch.run() for batch in share.batches.values()])
        self._bytes += share.nbytes
        self._pieces += share.pieces
        self._tensors |= share.tensors
        self._seconds["fill"] += time.perf_counter() - started
        return dict(zip(share.batches, found, strict=True))

    def _find(self, bucket: Bucket) -> Share:
        """This rank's part of a bucket; kept for all syncs where all of it are views of parameters."""
        batches, nbytes, pieces = {}, 0, 0
        names: set[str] = set()
        kept = True
        for number, group in enumerate(self._whole_plan.groups[bucket.index]):
            if group.trainer != self._rank.number:
                continue
            copies = [self._copy(bucket, tensor, piece) for tensor, piece in group.pieces]
            kept = kept and all(self._rank.is_view(tensor, piece) for tensor, piece in group.pieces)
            batches[number] = self._slots.filling(copies)
            nbytes += sum(target.nbytes for _, target in copies)
            pieces += len(copies)
            names.update(tensor.name for tensor, _ in group.pieces)
        share = Share(batches, nbytes, pieces, frozenset(names))
        if kept:
            self._rank.kept[bucket.index] = share
        return share

    def _copy(self, bucket: Bucket, tensor: PlacedTensor, piece: PlacedPiece) -> tuple[torch.Tensor, torch.Tensor]:
        source = self._rank.read(tensor, piece)
        target = self._target(bucket, tensor, piece, source.shape)
        castable = source.is_floating_point() and target.is_floating_point()
        if source.shape != target.shape or not (castable or source.dtype == target.dtype):
            raise WeightSyncError(
                f"{tensor.name}: the trainer holds {source.dtype} {tuple(source.shape)}, "
                f"expected {target.dtype} {tuple(target.shape)}"
            )
        return source.detach(), target

    def _target(self, bucket: Bucket, tensor: PlacedTensor, piece: PlacedPiece, shape: torch.Size) -> torch.Tensor:
        """Place in a slot of a piece that is held in this shape."""
        index = bucket.index % SLOT_COUNT
        target = piece.part.of(self._slots.tensor(index, tensor.offset, self._plan.torch_dtype, tensor.shape))
        rows = shape[: len(shape) - target.dim() + 1]
        if len(rows) > 1 and len(target) == math.prod(rows):
            target = target.unflatten(0, rows)
        return target

    def _wait(self, blocking: Callable[[], list[str]], what: str) -> None:
        started = time.perf_counter()
        assert self._end.mailbox is not None
        while blocking():
            self._take(
                self._end.mailbox.receive(self._version, self._deadline, lambda: f"{what}: {', '.join(blocking())}")
            )
        self._seconds["wait"] += time.perf_counter() - started
