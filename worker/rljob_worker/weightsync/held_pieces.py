"""What a trainer holds of the tensors, and what is found once of how it gets into the slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rljob_worker.tensor_slice import TensorSlice
from rljob_worker.weightsync.plan import PlacedPiece, PlacedTensor, SyncPlan
from rljob_worker.weightsync.slots import Batch


class Piece(Protocol):
    """A slice of a tensor with its data, as `tensor_slice.Piece`."""

    @property
    def place(self) -> TensorSlice:
        """Which slice."""
        ...

    def read(self) -> torch.Tensor:
        """The data in HF layout, on the trainer's device."""
        ...

    def view(self) -> torch.Tensor:
        """The same as a view of the parameter, whose first dimension may be two."""
        ...

    def address(self) -> int:
        """Where the parameter is in memory now."""
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank writes into a bucket."""

    batches: dict[int, Batch]
    """By number of the group of pieces."""
    nbytes: int
    pieces: int
    tensors: frozenset[str]
    """Names."""


class HeldPieces:
    """What a rank sends by a plan.

    Raises:
        ValueError: the plan gives it a piece to send that it does not hold.
    """

    def __init__(self, number: int, pieces: Sequence[Piece], plan: SyncPlan) -> None:
        self.number = number
        held: dict[str, list[Piece]] = {}
        for piece in pieces:
            held.setdefault(piece.place.hf_name, []).append(piece)
        self._sources = {
            (tensor.name, tensor.first, piece.part): self._source(tensor, piece, held.get(tensor.name, ()))
            for bucket in plan.buckets
            for tensor, piece in bucket.pieces_of(number)
        }
        self._last: tuple[Piece, torch.Tensor] | None = None
        holders = {id(holder): holder for holder, _ in self._sources.values()}
        self._places = [holder.address for holder in holders.values()]
        self._addresses: list[int] = []
        self.kept: dict[int, Share] = {}
        """Bucket -> what this rank writes into it, where that is found once for all syncs."""

    def look_for_parameters(self) -> None:
        """Find everything again when a parameter is no longer where it was."""
        addresses = [place() for place in self._places]
        if addresses != self._addresses:
            self.kept.clear()
            self._addresses = addresses

    def read(self, tensor: PlacedTensor, piece: PlacedPiece) -> torch.Tensor:
        """A piece's data; its first dimension may be several, where the parameter has its rows in groups."""
        holder, rows = self._sources[tensor.name, tensor.first, piece.part]
        if rows == slice(0, holder.place.shape[0]):
            return holder.view()
        if self._last is None or self._last[0] is not holder:
            # Some shards are put together to be read, and slices of one follow each other.
            self._last = (holder, holder.read())
        return self._last[1][rows]

    def is_view(self, tensor: PlacedTensor, piece: PlacedPiece) -> bool:
        """Whether `read` gives a view of the parameter, which has the next version's values too."""
        holder, rows = self._sources[tensor.name, tensor.first, piece.part]
        if rows == slice(0, holder.place.shape[0]):
            return True
        return self.read(tensor, piece).untyped_storage().data_ptr() == holder.view().untyped_storage().data_ptr()

    def forget(self) -> None:
        """Drop what was read last: it is no view of the parameter, which will change."""
        self._last = None

    def _source(self, tensor: PlacedTensor, piece: PlacedPiece, held: Sequence[Piece]) -> tuple[Piece, slice]:
        for holder in held:
            rows = tensor.rows_in(piece, holder.place.part)
            if rows is not None:
                return holder, rows
        raise ValueError(
            f"rank {self.number} has to send {tensor.name} from {tensor.first + piece.part.start}, but has it not"
        )
