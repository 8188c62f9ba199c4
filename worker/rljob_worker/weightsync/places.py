"""Places of the tensors of a sync in an engine: views of memory, and the modules that own it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from rljob_worker.tensor_slice import Part
from rljob_worker.upstream.vllm_types import ModelConfig

if TYPE_CHECKING:
    from rljob_worker.upstream.vllm_types import Model
    from rljob_worker.weightsync.slots import Batch


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a tensor's memory, as `torch.as_strided` has them."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Elements from the tensor's first one."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """The view that `tensor` is of a tensor that begins where its storage does."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of `tensor`."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Taken:
    """Pieces and groups of a bucket of which a worker has a part."""

    groups: list[bool]
    untaken: list[int]
    """Numbers of pieces, tensor by tensor."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of a checkpoint's tensor, and where they go."""

    module: str
    parameter: str
    """Name inside the module."""
    source: View
    target: View


class Scratch:
    """Memory for the parameters of one module after the other, kept: new pages cost more than the copy into them."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, like: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """A tensor of the shape, strides and dtype of `like`, with any values; of a device, or torch's default one."""
        for position, tensor in enumerate(self._free):
            if same_layout(tensor, like):
                return self._free.pop(position)
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)

    def give_back(self, tensors: list[torch.Tensor]) -> None:
        """Nobody uses them any more."""
        self._free += tensors

    def drop(self) -> None:
        """Free the memory."""
        self._free = []


class Owner(Protocol):
    """A module of the engine, which has places."""

    name: str
    tensors: set[str]
    """Names of what it is loaded from."""

    @property
    def fills(self) -> Sequence[object]:
        """Padding that no sync brings."""
        ...

    def parameter(self, name: str) -> torch.Tensor:
        """The one that copies go to now."""
        ...

    def lands_in_place(self) -> bool:
        """Whether it computes with what copies are made into, as it is."""
        ...

    def keeps_layout(self) -> bool:
        """Whether what it computes with is in the layout of what comes."""
        ...

    def begin(self) -> None:
        """Have places in the layout of what comes."""
        ...

    def complete(self) -> None:
        """All of it has come."""
        ...

    def place_back(self) -> None:
        """Be as before `begin`."""
        ...


class Places(ABC):
    """The place of each tensor of a sync.

    Args:
        tensors: shapes of all of them.
        copies: what is copied of each, found once.
        owners: by name.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[int, ...]], copies: Mapping[str, list[Copy]], owners: Mapping[str, Owner]
    ) -> None:
        self.copies = copies
        self._owners = owners
        self.scratch = Scratch()
        self.taken = {name: part_of(found, tuple(tensors[name])) for name, found in copies.items() if found}
        """The part of each tensor that goes to one place as it is; None where it does not."""
        self.owners = {
            name: [owners[owner] for owner in dict.fromkeys(copy.module for copy in found)]
            for name, found in copies.items()
        }
        """The modules that each tensor goes to."""
        self.kept: dict[int, list[Batch | None]] = {}
        """Bucket -> how all of it lands, by group of pieces, where no module's parameters come and go."""
        self.of_bucket: dict[int, Taken] = {}
        """Bucket -> what this worker has a part of."""

    def copy(self, name: str, whole: torch.Tensor) -> None:
        """Copy a whole tensor to its places."""
        for source, target in self.pairs(name, whole):
            target.copy_(source)

    def pairs(self, name: str, whole: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of a whole tensor, and their places."""
        return [(copy.source.on(whole), self._target(copy)) for copy in self.copies[name]]

    def place(self, name: str, first: int, count: int) -> tuple[Part | None, torch.Tensor]:
        """Find the place of some rows of a tensor that `taken` has a part of.

        Args:
            name: the tensor.
            first: index of the first row.
            count: rows.

        Returns:
            A part of a tensor of these rows alone, None where none of them is taken; and the memory that has that part.
        """
        taken, part = self.taken[name], self.part(name, first, count)
        assert taken is not None
        target = self._target(self.copies[name][0])
        if taken.dim != 0:
            return taken, target.narrow(0, first, count)
        if part is None:
            return None, target
        rows = count if part.dim is None else part.length
        return part, target.narrow(0, max(taken.start, first) - taken.start, rows)

    def part(self, name: str, first: int, count: int) -> Part | None:
        """The part of some rows that is taken of a tensor that `taken` has a part of; None: none."""
        taken = self.taken[name]
        assert taken is not None
        if taken.dim != 0:
            return taken
        start, end = max(taken.start, first), min(taken.start + taken.length, first + count)
        if start >= end:
            return None
        return Part() if end - start == count else Part(0, start - first, end - start)

    def _target(self, copy: Copy) -> torch.Tensor:
        return copy.target.on(self._owners[copy.module].parameter(copy.parameter))

    def packed(self) -> Iterator[str]:
        """Names of modules whose parameters are in another layout than a checkpoint's."""
        return (name for name, module in self._owners.items() if not module.keeps_layout())

    def place_back(self) -> None:
        """Give up what an unfinished sync has begun."""
        for module in self._owners.values():
            module.place_back()

    @abstractmethod
    def finish(self, model_config: ModelConfig) -> None:
        """Make the model ready to run when all tensors are there."""

    @abstractmethod
    def holds(self, model: Model) -> bool:
        """Whether the places are still what `model` computes with."""


def part_of(copies: Sequence[Copy], shape: tuple[int, ...]) -> Part | None:
    """The part of a tensor of `shape` that goes to one place as it is; None where it is none, or changes its shape."""
    source, target = copies[0].source, copies[0].target
    if len(copies) > 1 or source.stride != _strides(shape) or source.shape != target.shape:
        return None
    cut = [dim for dim, length in enumerate(shape) if source.shape[dim] != length]
    if not cut:
        return Part()
    return Part(cut[0], source.offset // source.stride[cut[0]], source.shape[cut[0]]) if len(cut) == 1 else None


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, strides and number format."""
    return one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()
