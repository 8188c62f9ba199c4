"""The interface of the two staging slots that trainers write and engines read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rljob_worker.devices.checksum import BegunChecksum
from rljob_worker.tensor_slice import Part
from rljob_worker.weightsync.plan import Bucket, PlacedPiece, PlacedTensor

SLOT_COUNT = 2
Checksum = int | BegunChecksum


@dataclass(frozen=True, slots=True)
class Move:
    """A copy out of a slot, and what is summed once it is made."""

    source: torch.Tensor | None
    target: torch.Tensor | None
    """Target of the shape of `source`; neither where nothing is copied."""
    summed: torch.Tensor | None
    """The target, or the piece in the slot of which only some is copied, or which is copied to several places."""


class Batch(Protocol):
    """Pieces that are copied and summed together; found once, run at each sync."""

    def run(self) -> Checksum:
        """Make the copies; the digest of all pieces, 64 bit over their bytes one after the other.

        Two batches of the same pieces in the same order have the same digest, whichever side they are on.
        """
        ...


class Digest(Protocol):
    """A digest of moves whose memory is not there for long."""

    def add(self, move: Move) -> None:
        """Make the move; what it sums may change afterwards."""
        ...

    def begun(self) -> Checksum:
        """The digest of all that was added, as a batch of the same moves gives it."""
        ...


class Slots(Protocol):
    """Two slots that trainers write and engines read.

    On CPU they are in shared memory, one pair for all processes of the host (`shared_memory.SharedMemory`). On an
    accelerator each device has a pair of its own, which its trainer fills and shares with the engine on it
    (`device_ipc.DeviceIpc`).
    """

    @property
    def owned_bytes(self) -> int:
        """Bytes of both slots where this process made them; 0 where another did."""
        ...

    def tensor(self, index: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The view of slot `index` of `shape` and `dtype` that starts at `offset` bytes."""
        ...

    def filling(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Batch:
        """Copies of sources into places of a slot (same shapes); the digest is of the sources, as sent.

        Never of where they went. A source of another number format is rounded to that of its target, and then summed.
        """
        ...

    def landing(self, moves: Sequence[Move]) -> Batch:
        """Copies of places of a slot into an engine; the digest is of what each move says."""
        ...

    def checksums(self, begun: Sequence[Checksum]) -> list[int]:
        """The values of what batches and digests gave; a device is waited for once."""
        ...

    def digest(self) -> Digest:
        """Same digest as that of a batch, of moves that come one by one."""
        ...

    def synchronize(self) -> None:
        """Wait until all that was asked of the slots is done: before another process gets the news."""
        ...

    def close(self) -> None:
        """Give the slots back; nothing the second time."""
        ...


class Held(Protocol):
    """The parameters of a rank."""

    addresses: list[int]
    """Addresses of those that it sends, as they were found last."""

    def look_for_parameters(self) -> None:
        """Find the addresses again."""
        ...

    def view(self, tensor: PlacedTensor, piece: PlacedPiece) -> torch.Tensor | None:
        """A piece's data as a view of a parameter, whichever rank sends it; its first dimension may be several.

        None: this rank does not hold it, or not as a view.
        """
        ...


class Arrived(Protocol):
    """The tensors of a bucket that has come to a worker of an engine."""

    def pieces(self, bucket: Bucket, tensor: PlacedTensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """The pieces of a tensor; the first dimension of one may be several.

        On `meta`: a piece that does not come to this worker.
        """
        ...

    def whole(self, bucket: Bucket, tensor: PlacedTensor, dtype: torch.dtype) -> torch.Tensor:
        """All of its pieces as one contiguous tensor of its shape."""
        ...

    def copies(
        self, bucket: Bucket, tensor: PlacedTensor, dtype: torch.dtype, part: Part, target: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Sources and places, of one shape each, that make `target` that part of the tensor."""
        ...

    def stays(self, tensor: PlacedTensor) -> bool:
        """Whether `whole` is the same memory in each sync."""
        ...


class InSlots:
    """`Arrived` in slots."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def pieces(self, bucket: Bucket, tensor: PlacedTensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """See `Arrived`."""
        whole = self.whole(bucket, tensor, dtype)
        return [piece.part.of(whole) for piece in tensor.pieces]

    def whole(self, bucket: Bucket, tensor: PlacedTensor, dtype: torch.dtype) -> torch.Tensor:
        """See `Arrived`."""
        return self._slots.tensor(bucket.index % SLOT_COUNT, tensor.offset, dtype, tensor.shape)

    def copies(
        self, bucket: Bucket, tensor: PlacedTensor, dtype: torch.dtype, part: Part, target: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """See `Arrived`."""
        return [(part.of(self.whole(bucket, tensor, dtype)), target)]

    def stays(self, tensor: PlacedTensor) -> bool:
        """True: it is a view of a slot."""
        return True


def view_of(slot: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The view of `shape` and `dtype` that starts at `offset` bytes of a slot uint8 [slot_bytes]."""
    nbytes = dtype.itemsize * torch.Size(shape).numel()
    return slot[offset : offset + nbytes].view(dtype).view(shape)
