"""A part of a tensor, and of which one of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Part:
    """`tensor.narrow(dim, start, length)`, or all of a tensor where dim is None."""

    dim: int | None = None
    start: int = 0
    length: int = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of the whole tensor that this part covers."""
        return tensor if self.dim is None else tensor.narrow(self.dim, self.start, self.length)

    def misses(self, other: Part) -> bool:
        """Whether the two, cut along the same dimension, have no element in common."""
        if self.dim is None or other.dim != self.dim:
            return False
        return other.start + other.length <= self.start or other.start >= self.start + self.length

    def overlap(self, other: Part) -> tuple[Part, Part]:
        """The elements that two parts share, as a part of this one and as a part of the other."""
        if self.dim is None or other.dim is None or self.dim != other.dim:
            return other, self
        start, end = max(self.start, other.start), min(self.start + self.length, other.start + other.length)
        return Part(self.dim, start - self.start, end - start), Part(self.dim, start - other.start, end - start)

    def place_of(self, other: Part, target: torch.Tensor) -> torch.Tensor | None:
        """Place in `target`, which has this part alone, of another part; None where only some of that is in it."""
        if self.dim is None:
            return other.of(target)
        if other.dim != self.dim or other.start < self.start:
            return None
        if other.start + other.length > self.start + self.length:
            return None
        return target.narrow(self.dim, other.start - self.start, other.length)


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The part of a checkpoint's tensor that a process has; small, for ranks to exchange."""

    hf_name: str
    """Name of the tensor."""
    hf_shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dim: int | None
    start: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        if self.dim is None:
            return self.hf_shape
        return (*self.hf_shape[: self.dim], self.length, *self.hf_shape[self.dim + 1 :])

    @property
    def part(self) -> Part:
        """The part; equal for equal parts of a tensor."""
        return Part() if self.dim is None else Part(self.dim, self.start, self.length)

    @property
    def place(self) -> TensorSlice:
        """The slice without what a subclass adds; equal for equal parts of a tensor."""
        part = self.part
        return TensorSlice(self.hf_name, tuple(self.hf_shape), part.dim, part.start, part.length)


@dataclass(frozen=True, slots=True)
class Piece(TensorSlice):
    """A rank's shard of one HF tensor, and the way to its data."""

    read: Callable[[], torch.Tensor]
    """The shard in HF layout, in the parameter's dtype; a view of the parameter where the layout allows one."""
    view: Callable[[], torch.Tensor] | None
    """The shard as a view of the parameter, of as many dimensions as that takes; reshaped, it is what `read` gives.
    None: there is none, the shard is computed each time it is read."""
    address: Callable[[], int]
    """Address of the parameter in memory now: `view` gives the same view for as long as this is the same."""
    write: Callable[[torch.Tensor], None]
    """Store a shard of the same shape into the parameter, casting to its dtype."""
    primary: bool = True
    """Over the ranks of a job, the primary pieces cover each tensor exactly once."""


def storage_of(tensor: torch.Tensor) -> int:
    """The same number for all tensors over one storage, while it lives; on `meta` too, where there is no address."""
    return tensor.untyped_storage()._cdata
