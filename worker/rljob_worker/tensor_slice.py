"""A part of a tensor of a Hugging Face checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """`tensor.narrow(dim, start, length)`, or all of the tensor where dim is None; small, for ranks to exchange."""

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
    def place(self) -> TensorSlice:
        """The slice without what a subclass adds; equal for equal parts of a tensor."""
        if self.dim is None:
            return TensorSlice(self.hf_name, tuple(self.hf_shape), None, 0, 0)
        return TensorSlice(self.hf_name, tuple(self.hf_shape), self.dim, self.start, self.length)
