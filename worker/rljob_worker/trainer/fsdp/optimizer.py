"""AdamW on a rank's own rows, its state in few flat tensors that can sleep, be saved and rolled back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rljob_api.spec import OptimizerSpec
from rljob_worker.devices.overlap import Overlap
from rljob_worker.memory.sleeping import Region
from rljob_worker.trainer.state_buckets import buckets, update_through_buffers


@dataclass(frozen=True, slots=True)
class RowsState:
    """Adam's state of one parameter's rows; views of the flat tensors."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    """0-dim float32, updates so far."""


class ShardedAdamW:
    """Fused AdamW with decoupled weight decay, not applied to norms and biases.

    On local tensors: the utilities of DTensor take 3.5 times as long for the same numbers.

    Args:
        rows: this rank's fp32 rows of each parameter, which are updated in place.
        spec: the job's optimizer.
        region: where the state sleeps.
        overlap: the device's, if it lives in pinned host memory, and is on the device bucket by bucket during an update
            alone.
    """

    def __init__(
        self,
        rows: Mapping[str, Tensor],
        spec: OptimizerSpec,
        region: Region,
        *,
        overlap: Callable[[], Overlap] | None = None,
    ) -> None:
        self._rows = dict(rows)
        self._spec = spec
        self._device = device = next(iter(rows.values())).device
        home, pinned = (torch.device("cpu"), device.type != "cpu") if overlap else (device, False)
        self._overlap = overlap
        total = sum(tensor.numel() for tensor in rows.values())
        with region("backup"):
            self.flats = [torch.zeros(total, device=home, pin_memory=pinned) for _ in range(2)]
            self.steps = torch.zeros(len(rows), device=home, pin_memory=pinned)
        self._buckets = list(_buckets(rows))

    @property
    def states(self) -> dict[str, RowsState]:
        """By parameter, in model order."""
        found: dict[str, RowsState] = {}
        for bucket in self._buckets:
            found |= self._states(bucket, self._home(bucket))
        return found

    def step(self, gradients: Mapping[str, Tensor], learning_rate: float) -> None:
        """Update all rows, given the gradient of each."""

        def update(number: int, here: list[Tensor]) -> None:
            self._step(self._states(self._buckets[number], here), gradients, learning_rate)

        homes = [self._home(bucket) for bucket in self._buckets]
        if self._overlap:
            update_through_buffers(homes, update, self._device, self._overlap)
            return
        for number, home in enumerate(homes):
            update(number, home)

    def _home(self, bucket: _Bucket) -> list[Tensor]:
        """A bucket's part of the moments, and its updates so far."""
        return [*(flat[bucket.span] for flat in self.flats), self.steps[bucket.places]]

    def _states(self, bucket: _Bucket, tensors: list[Tensor]) -> dict[str, RowsState]:
        found: dict[str, RowsState] = {}
        *flats, steps = tensors
        start = 0
        for index, name in enumerate(bucket.names):
            shape = self._rows[name].shape
            exp_avg, exp_avg_sq = (flat[start : start + shape.numel()].view(shape) for flat in flats)
            found[name] = RowsState(exp_avg, exp_avg_sq, steps[index])
            start += shape.numel()
        return found

    @torch.no_grad()
    def _step(self, states: Mapping[str, RowsState], gradients: Mapping[str, Tensor], learning_rate: float) -> None:
        spec = self._spec
        for decay in (spec.weight_decay, 0.0):
            names = [name for name in states if self._decay(name) == decay and self._rows[name].numel()]
            adamw(
                [self._rows[name] for name in names],
                [gradients[name] for name in names],
                [states[name].exp_avg for name in names],
                [states[name].exp_avg_sq for name in names],
                [],
                [states[name].step for name in names],
                fused=True,
                amsgrad=False,
                beta1=spec.beta1,
                beta2=spec.beta2,
                lr=learning_rate,
                weight_decay=decay,
                eps=spec.eps,
                maximize=False,
            )
            if spec.weight_decay == 0.0:
                break

    def _decay(self, name: str) -> float:
        return self._spec.weight_decay if self._rows[name].dim() > 1 else 0.0


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Neighbours whose state moves together."""

    names: list[str]
    span: slice
    """Span of the flat tensors."""
    places: slice
    """Places of the steps."""


def _buckets(rows: Mapping[str, Tensor]) -> Iterator[_Bucket]:
    names, sizes = list(rows), [tensor.numel() for tensor in rows.values()]
    start = 0
    for places in buckets(sizes):
        end = start + sum(sizes[places])
        yield _Bucket(names[places], slice(start, end), places)
        start = end
