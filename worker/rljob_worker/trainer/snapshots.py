"""Copies of a rank's tensors on the host: the state before a step, and the starting weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Snapshot:
    """A copy of the state before a step of several updates, to go back to; its host memory is kept between steps."""

    def __init__(self, state: Sequence[Tensor]) -> None:
        self._live = list(state)
        self._copy = [torch.empty_like(tensor, device="cpu") for tensor in self._live]

    def take(self) -> None:
        """Copy the present state."""
        self._move(self._live, self._copy)

    def restore(self) -> None:
        """Put the copied state back, bit for bit."""
        self._move(self._copy, self._live)

    @staticmethod
    @torch.no_grad()
    def _move(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
        for from_, to in zip(source, target, strict=True):
            to.copy_(from_)


class Reference:
    """The starting weights, kept on the host and put into the parameter buffers while it is needed."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._weights = [parameter.detach().to("cpu", copy=True) for parameter in parameters]
        self._set_aside = [torch.empty_like(weights) for weights in self._weights]

    def __enter__(self) -> None:
        for parameter, weights, aside in zip(self._parameters, self._weights, self._set_aside, strict=True):
            aside.copy_(parameter)
            parameter.copy_(weights)

    def __exit__(self, *_exc: object) -> None:
        for parameter, aside in zip(self._parameters, self._set_aside, strict=True):
            parameter.copy_(aside)
