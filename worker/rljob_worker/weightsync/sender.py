"""A trainer's side of the weight sync."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from rljob_worker.weightsync import rendezvous
from rljob_worker.weightsync.errors import WeightSyncError
from rljob_worker.weightsync.exchange import Exchange
from rljob_worker.weightsync.mailbox import Mailbox, PeerAborted, consumer_name, producer_name
from rljob_worker.weightsync.plan import Bucket, PieceGeometry, PieceLike, PlacedPiece, PlacedTensor, SyncPlan
from rljob_worker.weightsync.protocol import COMMIT, FILLED, ProducerState, describe_piece
from rljob_worker.weightsync.slots import SLOT_COUNT, Slots
from rljob_worker.weightsync.staging import Staging
from rljob_worker.weightsync.sync_ids import SyncIds
from rljob_worker.weightsync.threads import half_the_threads


class ReadablePiece(PieceLike, Protocol):
    """A piece with its data, as `models.convert.Piece`."""

    def read(self) -> torch.Tensor:
        """The shard in HF layout, on the trainer's device."""
        ...


class WeightSender:
    """Writes this rank's pieces into the slots, bucket by bucket, once all engines have room.

    All ranks build the same plan (gather `PieceGeometry.of(piece)` of the primary pieces over the ranks) and then:

        sender = WeightSender(pieces, plan, producer=rank, folder=sync_folder)
        report = sender.send(version, deadline=60.0)

    In host memory all ranks write into the same slots, and one that the plan gives nothing to send has nothing to do:
    `send` returns at once. On accelerators each rank fills the slots of its own device, with the other ranks' pieces
    too, and `send` is collective.
    """

    def __init__(
        self,
        pieces: Sequence[ReadablePiece],
        plan: SyncPlan,
        *,
        producer: int,
        folder: str | Path,
        exchange: Exchange | None = None,
    ) -> None:
        """Bind the socket; the lowest sending rank also tells the others the plan, and makes the slots in host memory.

        Args:
            pieces: what this rank holds; of tensors that others send too, the plan says who.
            plan: the same on all ranks.
            producer: this rank's number in the plan.
            folder: a short path, the same for all trainers and engines of the host and for them alone.
            exchange: the trainers of the host whose devices have slots of their own; None: host memory.

        Raises:
            ValueError: a piece that the plan gives to this rank is not in `pieces`, or the folder's path is too long.
            WeightSyncError: no room for the slots.
        """
        self.plan = plan
        self._producer, self._folder, self._exchange = producer, folder, exchange
        self._sends = producer in plan.producers
        self._ids = SyncIds()
        self._slots: Staging | None = None
        if exchange is not None:
            self._slots = slots = exchange.make_slots(plan.slot_bytes)
            rendezvous.publish_device(folder, exchange.device.identity(), slots.handles())
        if not self._sends:
            return
        self._pieces = _pieces_by_place(pieces)
        self._check_pieces()
        self._consumers = [consumer_name(consumer) for consumer in range(plan.consumers)]
        peers = [*map(producer_name, plan.producers), *self._consumers]
        self._mailbox = Mailbox(folder, producer_name(producer), peers)
        if producer == plan.producers[0]:
            names: tuple[str, ...] = ()
            if exchange is None:
                self._slots = shared = Slots.create(rendezvous.run_name(folder), plan.slot_bytes)
                names = shared.names
            rendezvous.publish(folder, plan, names)

    def send(self, version: int, deadline: float, *, sync_id: int | None = None) -> dict[str, Any]:
        """Hand the weights over to all engines; returns when every engine has verified them.

        Args:
            version: the version these weights are; engines take it on.
            deadline: seconds from now by which it must be over.
            sync_id: greater with every attempt, the same on both sides; default: `version`.

        Returns:
            `version`, `bytes`, `tensors` and `pieces` that this rank sent, `staging_bytes` of the slots that it owns,
            `seconds` in all, and of those `read_seconds`, `fill_seconds` (copying and checksums), `spread_seconds`
            (exchange with the host's other trainers) and `wait_seconds` (for engines and other trainers).

        Raises:
            WeightSyncError: what went wrong on this or another side, naming who, the version and the bucket.
        """
        sync_id = self._ids.next(version, sync_id)
        if not self._sends and self._exchange is None:
            return {"version": version, "bytes": 0, "staging_bytes": 0, "tensors": 0, "pieces": 0, "seconds": 0.0}
        run = _Send(self, version, sync_id, time.monotonic() + deadline)
        try:
            with half_the_threads():
                return run()
        except PeerAborted as error:
            raise WeightSyncError(f"sending version {version}: {error}") from error
        except Exception as error:
            reason = f"sending version {version}, {run.doing}: {error}"
            self._abort(sync_id, reason)
            raise WeightSyncError(reason) from error
        except BaseException as error:
            self._abort(sync_id, f"sending version {version} was interrupted: {error!r}")
            raise

    def close(self) -> None:
        """Close the sockets and drop the slots; the rank that made them removes them."""
        if self._sends:
            self._mailbox.close()
        if self._slots is not None:
            self._slots.close()

    def _abort(self, sync_id: int, reason: str) -> None:
        if self._sends:
            self._mailbox.abort(sync_id, reason)

    def _check_pieces(self) -> None:
        for bucket in self.plan.buckets:
            for tensor, piece in bucket.pieces_of(self._producer):
                if (tensor.name, piece.dim, piece.start, piece.length) not in self._pieces:
                    raise ValueError(
                        f"rank {self._producer} has to send {tensor.name} from {piece.start}, but has it not"
                    )

    def _attached_slots(self, deadline: float) -> Staging:
        if self._slots is None:
            plan, names = rendezvous.find(self._folder, deadline)
            if plan.fingerprint != self.plan.fingerprint:
                raise WeightSyncError(f"{producer_name(plan.producers[0])} works by another plan")
            self._slots = Slots.attach(names, plan.slot_bytes)
        return self._slots


class _Send:
    """One sync, from the trainer's side."""

    def __init__(self, sender: WeightSender, version: int, sync_id: int, deadline: float) -> None:
        self._sender, self._plan, self._exchange = sender, sender.plan, sender._exchange
        self._version, self._sync_id, self._deadline = version, sync_id, deadline
        self._state = ProducerState(sender.plan, version)
        self._seconds = dict.fromkeys(("read", "fill", "spread", "wait"), 0.0)
        self._bytes = self._pieces = 0
        self._tensors: set[str] = set()
        self.doing = "before the first bucket"

    def __call__(self) -> dict[str, Any]:
        started = time.perf_counter()
        self._slots = self._sender._attached_slots(self._deadline)
        for bucket in self._plan.buckets:
            writes = self._sender._producer in bucket.producers()
            if writes or self._exchange is not None:
                self._send_bucket(bucket, writes)
        self.doing = "after the last bucket"
        with self._agreeing():
            if self._sender._sends:
                self._wait(self._state.not_done, "done")
        if self._sender._sends:
            self._tell(COMMIT)
        return {
            "version": self._version,
            "bytes": self._bytes,
            "staging_bytes": self._slots.owned_bytes,
            "tensors": len(self._tensors),
            "pieces": self._pieces,
            "seconds": time.perf_counter() - started,
            **{f"{what}_seconds": seconds for what, seconds in self._seconds.items()},
        }

    def _send_bucket(self, bucket: Bucket, writes: bool) -> None:
        self.doing = f"bucket {bucket.index}"
        pieces: list[dict[str, Any]] = []
        with torch.no_grad():
            with self._agreeing():
                if writes:
                    self._wait(lambda: self._state.blocking(bucket.index), f"room for bucket {bucket.index}")
                    pieces = [self._fill(bucket, *placed) for placed in bucket.pieces_of(self._sender._producer)]
            with self._agreeing():
                if self._exchange is not None:
                    self._spread(bucket, self._exchange)
        if writes:
            self._tell(FILLED, plan=self._plan.fingerprint, bucket=bucket.index, pieces=pieces)

    def _spread(self, bucket: Bucket, exchange: Exchange) -> None:
        started = time.perf_counter()
        exchange.spread(bucket, self._slots, self._plan.torch_dtype)
        self._slots.settle()
        self._seconds["spread"] += time.perf_counter() - started

    @contextmanager
    def _agreeing(self) -> Iterator[None]:
        """Something that no rank of the exchange goes on after when one of them failed in it."""
        try:
            yield
        except Exception as error:
            if self._exchange is not None:
                self._exchange.agree(str(error) or repr(error))
            raise
        if self._exchange is not None:
            started = time.perf_counter()
            self._exchange.agree()
            self._seconds["wait"] += time.perf_counter() - started

    def _tell(self, kind: str, **body: Any) -> None:
        sender = self._sender
        sender._mailbox.send(sender._consumers, kind, self._sync_id, version=self._version, **body)

    def _fill(self, bucket: Bucket, tensor: PlacedTensor, piece: PlacedPiece) -> dict[str, Any]:
        started = time.perf_counter()
        source = self._sender._pieces[tensor.name, piece.dim, piece.start, piece.length].read()
        self._seconds["read"] += time.perf_counter() - started
        target = piece.part_of(
            self._slots.tensor(bucket.index % SLOT_COUNT, tensor.offset, self._plan.torch_dtype, tensor.shape)
        )
        if source.shape != target.shape or source.dtype != target.dtype:
            raise WeightSyncError(
                f"{tensor.name}: the trainer holds {source.dtype} {tuple(source.shape)}, "
                f"expected {target.dtype} {tuple(target.shape)}"
            )
        checksum = self._slots.fill(source, target)
        self._seconds["fill"] += time.perf_counter() - started
        self._bytes += source.nbytes
        self._pieces += 1
        self._tensors.add(tensor.name)
        return describe_piece(tensor, piece, str(source.dtype).removeprefix("torch."), checksum)

    def _wait(self, blocking: Callable[[], list[str]], what: str) -> None:
        started = time.perf_counter()
        while blocking():
            mailbox = self._sender._mailbox
            self._state.take(mailbox.receive(self._sync_id, self._deadline, lambda: f"{what}: {', '.join(blocking())}"))
        self._seconds["wait"] += time.perf_counter() - started


def _pieces_by_place(
    pieces: Sequence[ReadablePiece],
) -> dict[tuple[str, int | None, int, int], ReadablePiece]:
    by_place = {}
    for piece in pieces:
        place = PieceGeometry.of(piece)
        by_place[place.hf_name, place.dim, place.start, place.length] = piece
    return by_place
