"""A trainer's side of the weight sync."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from rljob_worker.weightsync import rendezvous
from rljob_worker.weightsync.checksum import copy_with_checksum
from rljob_worker.weightsync.errors import WeightSyncError
from rljob_worker.weightsync.mailbox import Mailbox, PeerAborted, consumer_name, producer_name
from rljob_worker.weightsync.plan import Bucket, PieceGeometry, PieceLike, PlacedPiece, PlacedTensor, SyncPlan
from rljob_worker.weightsync.protocol import COMMIT, FILLED, ProducerState, describe_piece
from rljob_worker.weightsync.slots import SLOT_COUNT, Slots
from rljob_worker.weightsync.sync_ids import SyncIds
from rljob_worker.weightsync.threads import half_the_threads


class ReadablePiece(PieceLike, Protocol):
    """A piece with its data, as `models.convert.Piece`."""

    def read(self) -> torch.Tensor:
        """The shard in HF layout, on the CPU."""
        ...


class WeightSender:
    """Writes this rank's pieces into the slots, bucket by bucket, once all engines have room.

    All ranks build the same plan (gather `PieceGeometry.of(piece)` of the primary pieces over the ranks) and then:

        sender = WeightSender(pieces, plan, producer=rank, folder=sync_folder)
        report = sender.send(version, deadline=60.0)

    A rank that the plan gives nothing to send has nothing to do: `send` returns at once.
    """

    def __init__(self, pieces: Sequence[ReadablePiece], plan: SyncPlan, *, producer: int, folder: str | Path) -> None:
        """Bind the socket; the lowest sending rank also makes the slots and tells the others where they are.

        Args:
            pieces: what this rank holds; of tensors that others send too, the plan says who.
            plan: the same on all ranks.
            producer: this rank's number in the plan.
            folder: a short path, the same for all trainers and engines of the host and for them alone.

        Raises:
            ValueError: a piece that the plan gives to this rank is not in `pieces`, or the folder's path is too long.
            WeightSyncError: no room for the slots.
        """
        self.plan = plan
        self._producer, self._folder = producer, folder
        self._takes_part = producer in plan.producers
        self._ids = SyncIds()
        self._slots: Slots | None = None
        if not self._takes_part:
            return
        self._pieces = _pieces_by_place(pieces)
        self._check_pieces()
        self._consumers = [consumer_name(consumer) for consumer in range(plan.consumers)]
        peers = [*map(producer_name, plan.producers), *self._consumers]
        self._mailbox = Mailbox(folder, producer_name(producer), peers)
        if producer == plan.producers[0]:
            self._slots = Slots.create(rendezvous.run_name(folder), plan.slot_bytes)
            rendezvous.publish(folder, plan, self._slots.names)

    def send(self, version: int, deadline: float, *, sync_id: int | None = None) -> dict[str, Any]:
        """Hand the weights over to all engines; returns when every engine has verified them.

        Args:
            version: the version these weights are; engines take it on.
            deadline: seconds from now by which it must be over.
            sync_id: greater with every attempt, the same on both sides; default: `version`.

        Returns:
            `version`, `bytes`, `tensors` and `pieces` that this rank sent, `seconds` in all, and of those
            `read_seconds`, `fill_seconds` (copying and checksums) and `wait_seconds` (for engines).

        Raises:
            WeightSyncError: what went wrong on this or another side, naming who, the version and the bucket.
        """
        sync_id = self._ids.next(version, sync_id)
        if not self._takes_part:
            return {"version": version, "bytes": 0, "tensors": 0, "pieces": 0, "seconds": 0.0}
        run = _Send(self, version, sync_id, time.monotonic() + deadline)
        try:
            with half_the_threads():
                return run()
        except PeerAborted as error:
            raise WeightSyncError(f"sending version {version}: {error}") from error
        except Exception as error:
            reason = f"sending version {version}, {run.doing}: {error}"
            self._mailbox.abort(sync_id, reason)
            raise WeightSyncError(reason) from error
        except BaseException as error:
            self._mailbox.abort(sync_id, f"sending version {version} was interrupted: {error!r}")
            raise

    def close(self) -> None:
        """Close the sockets and drop the slots; the rank that made them removes them."""
        if self._takes_part:
            self._mailbox.close()
        if self._slots is not None:
            self._slots.close()

    def _check_pieces(self) -> None:
        for bucket in self.plan.buckets:
            for tensor, piece in bucket.pieces_of(self._producer):
                if (tensor.name, piece.dim, piece.start, piece.length) not in self._pieces:
                    raise ValueError(
                        f"rank {self._producer} has to send {tensor.name} from {piece.start}, but has it not"
                    )

    def _attached_slots(self, deadline: float) -> Slots:
        if self._slots is None:
            plan, names = rendezvous.find(self._folder, deadline)
            if plan.fingerprint != self.plan.fingerprint:
                raise WeightSyncError(f"{producer_name(plan.producers[0])} works by another plan")
            self._slots = Slots.attach(names, plan.slot_bytes)
        return self._slots


class _Send:
    """One sync, from the trainer's side."""

    def __init__(self, sender: WeightSender, version: int, sync_id: int, deadline: float) -> None:
        self._sender, self._plan, self._mailbox = sender, sender.plan, sender._mailbox
        self._version, self._sync_id, self._deadline = version, sync_id, deadline
        self._state = ProducerState(sender.plan, version)
        self._seconds = dict.fromkeys(("read", "fill", "wait"), 0.0)
        self._bytes = self._pieces = 0
        self._tensors: set[str] = set()
        self.doing = "before the first bucket"

    def __call__(self) -> dict[str, Any]:
        started = time.perf_counter()
        self._slots = self._sender._attached_slots(self._deadline)
        for bucket in self._plan.buckets:
            if self._sender._producer in bucket.producers():
                self._send_bucket(bucket)
        self.doing = "after the last bucket"
        self._wait(self._state.not_done, "done")
        self._mailbox.send(self._sender._consumers, COMMIT, self._sync_id, version=self._version)
        return {
            "version": self._version,
            "bytes": self._bytes,
            "tensors": len(self._tensors),
            "pieces": self._pieces,
            "seconds": time.perf_counter() - started,
            **{f"{what}_seconds": seconds for what, seconds in self._seconds.items()},
        }

    def _send_bucket(self, bucket: Bucket) -> None:
        self.doing = f"bucket {bucket.index}"
        self._wait(lambda: self._state.blocking(bucket.index), f"room for bucket {bucket.index}")
        with torch.no_grad():
            pieces = [self._fill(bucket, *placed) for placed in bucket.pieces_of(self._sender._producer)]
        self._mailbox.send(
            self._sender._consumers,
            FILLED,
            self._sync_id,
            version=self._version,
            plan=self._plan.fingerprint,
            bucket=bucket.index,
            pieces=pieces,
        )

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
        checksum = copy_with_checksum(source, target)
        self._seconds["fill"] += time.perf_counter() - started
        self._bytes += source.nbytes
        self._pieces += 1
        self._tensors.add(tensor.name)
        return describe_piece(tensor, piece, str(source.dtype).removeprefix("torch."), checksum)

    def _wait(self, blocking: Callable[[], list[str]], what: str) -> None:
        started = time.perf_counter()
        while blocking():
            self._state.take(
                self._mailbox.receive(self._sync_id, self._deadline, lambda: f"{what}: {', '.join(blocking())}")
            )
        self._seconds["wait"] += time.perf_counter() - started


def _pieces_by_place(
    pieces: Sequence[ReadablePiece],
) -> dict[tuple[str, int | None, int, int], ReadablePiece]:
    by_place = {}
    for piece in pieces:
        place = PieceGeometry.of(piece)
        by_place[place.hf_name, place.dim, place.start, place.length] = piece
    return by_place
