"""Adam state of Megatron's distributed optimizers as few flat tensors that can sleep, be saved and rolled back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rljob_worker.devices.overlap import Overlap
from rljob_worker.memory.sleeping import Region
from rljob_worker.trainer.state_buckets import buckets, update_through_buffers
from rljob_worker.upstream.megatron_types import ChainedOptimizer, DistributedDataParallel

if TYPE_CHECKING:
    from rljob_worker.upstream.megatron_types import Parameter


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one parameter that this data-parallel rank updates, and its Adam state; flat views."""

    name: str
    start: int
    """Its first element in the flat parameter."""
    master: Tensor
    """float32; in fp32 training a view of the parameter itself."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    """0-dim float32, updates so far."""


class OptimizerState:
    """Adam state of Megatron's distributed optimizers, moved into flat tensors.

    Attributes:
        flats: moments (and, in bf16 training, fp32 master weights), one flat tensor each.
        shards: what this rank updates, in a fixed order.
    """

    def __init__(
        self,
        optimizer: ChainedOptimizer,
        ddp: DistributedDataParallel,
        region: Region,
        *,
        overlap: Callable[[], Overlap] | None = None,
    ) -> None:
        """Take over the state of a new optimizer.

        Args:
            optimizer: Megatron's chained distributed optimizers.
            ddp: the model that they update.
            region: where the tensors sleep.
            overlap: the device's, if they live in pinned host memory, and are on the device bucket by bucket in `apply`
                alone.
        """
        names = {param: name for name, param in ddp.module.named_parameters()}
        self._optimizer, self._ddp = optimizer, ddp
        self._entries = list(_entries(optimizer, names))
        self._overlap = overlap
        total = sum(entry.main.numel() for entry in self._entries)
        count = 3 if any(entry.owned for entry in self._entries) else 2
        self._device = self._entries[0].main.device if self._entries else torch.device("cpu")
        home = torch.device("cpu") if overlap else self._device
        pinned = overlap is not None and self._device.type != "cpu"
        with region("backup"):
            self.flats = [torch.zeros(total, dtype=torch.float32, device=home, pin_memory=pinned) for _ in range(count)]
            self._steps = torch.zeros(len(self._entries), dtype=torch.float32, device=home, pin_memory=pinned)
        for entry in self._entries:
            if entry.owned:
                self.flats[2][entry.span].copy_(entry.main)
        self._buckets = list(_buckets(self._entries))
        self._work_on(self._whole, self.flats, self._steps)
        self.shards: list[Shard] = []
        for entry, step in zip(self._entries, self._steps, strict=True):
            master = self.flats[2][entry.span] if entry.owned else entry.main.detach()
            exp_avg, exp_avg_sq = (flat[entry.span] for flat in self.flats[:2])
            self.shards.append(Shard(entry.name, entry.start, master, exp_avg, exp_avg_sq, step))

    @property
    def owns_masters(self) -> bool:
        """Whether master weights are apart from the parameters (bf16 training)."""
        return len(self.flats) == 3

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around an update: masters take gradients, wherever their values are."""
        if self._overlap and self.owns_masters:
            # Of the same shape on the device, without memory: no value is read before its bucket comes.
            nothing = torch.zeros((), device=self._device)
            for entry in self._entries:
                if entry.owned:
                    entry.hold(nothing.expand(entry.main.numel()))
        try:
            yield
        finally:
            if self._overlap:
                self._work_on(self._whole, self.flats, self._steps)

    def apply(self) -> None:
        """Update all parameters with the gradients that are ready; collective."""
        if self._overlap is None:
            self._optimizer.step_with_ready_grads()
            return
        homes = [self._home(bucket) for bucket in self._buckets]
        update_through_buffers(homes, self._update, self._device, self._overlap)
        self._ddp.start_param_sync()

    @property
    def _whole(self) -> slice:
        return slice(0, len(self._entries))

    def _home(self, bucket: slice) -> list[Tensor]:
        """A bucket's part of the flat tensors, and its updates so far."""
        entries = self._entries[bucket]
        span = slice(entries[0].span.start, entries[-1].span.stop)
        return [*(flat[span] for flat in self.flats), self._steps[bucket]]

    def _update(self, number: int, here: list[Tensor]) -> None:
        """Update one bucket, whose state is here; no parameter refers to it afterwards."""
        bucket = self._buckets[number]
        entries = self._entries[bucket]
        self._work_on(bucket, here[:-1], here[-1], gradients=[entry.main.grad for entry in entries])
        with _alone(entries):
            entries[0].inner.step()
        for entry in entries:
            if entry.owned:
                entry.of_model().copy_(entry.main)
        home = self._home(bucket)
        self._work_on(bucket, home[:-1], home[-1])

    def _work_on(
        self,
        bucket: slice,
        flats: list[Tensor],
        steps: Tensor,
        gradients: Sequence[Tensor | None] | None = None,
    ) -> None:
        """Have the optimizers compute with these tensors, a bucket's; masters get these gradients, or none."""
        entries = self._entries[bucket]
        start = entries[0].span.start if entries else 0
        given = gradients or [None] * len(entries)
        for entry, step, gradient in zip(entries, steps, given, strict=True):
            span = slice(entry.span.start - start, entry.span.stop - start)
            if entry.owned:
                entry.hold(flats[2][span])
                entry.main.grad = gradient
            entry.inner.state[entry.main].update(step=step, exp_avg=flats[0][span], exp_avg_sq=flats[1][span])


@dataclass(frozen=True, slots=True)
class _Entry:
    """A shard as Megatron has it."""

    name: str
    parameter: Parameter
    """The model's."""
    start: int
    """Its first element in the flat parameter."""
    inner: torch.optim.Optimizer
    main: Tensor
    owned: bool
    """Whether `main` is a copy of its own, and no view of the parameter."""
    span: slice
    """Its place in the flat tensors."""

    def hold(self, values: Tensor) -> None:
        """Give a master that is a copy of its own these values, and no gradient: one of another device is refused."""
        self.main.grad = None
        self.main.data = values

    def of_model(self) -> Tensor:
        """The same elements in the model's parameter; a view."""
        return self.parameter.data.view(-1)[self.start : self.start + self.main.numel()]


def _buckets(entries: Sequence[_Entry]) -> Iterator[slice]:
    """Buckets of entries that one optimizer updates, as slices of all."""
    first = 0
    for _, group in groupby(entries, key=lambda entry: id(entry.inner)):
        sizes = [entry.main.numel() for entry in group]
        for places in buckets(sizes):
            yield slice(first + places.start, first + places.stop)
        first += len(sizes)


@contextmanager
def _alone(entries: Sequence[_Entry]) -> Iterator[None]:
    """Inside, the optimizer of these entries has no others.

    Raises:
        RuntimeError: it counts updates of all its parameters at once, so that each bucket would count as one.
    """
    groups = entries[0].inner.param_groups
    everything = [group["params"] for group in groups]
    wanted = {id(entry.main) for entry in entries}
    for group in groups:
        group["params"] = [main for main in group["params"] if id(main) in wanted]
    try:
        yield
    finally:
        for group, params in zip(groups, everything, strict=True):
            group["params"] = params
    if any("step" in group for group in groups):
        kind = type(entries[0].inner).__name__
        raise RuntimeError(
            f"training.optimizer.hostOffload: {kind} counts updates in its groups, as torch's AdamW does not"
        )


def _entries(optimizer: ChainedOptimizer, names: Mapping[Parameter, str]) -> Iterator[_Entry]:
    start = 0
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        for models, mains, owned in (
            (part.model_fp32_groups, part.shard_fp32_groups, False),
            (part.model_float16_groups, part.shard_fp32_from_float16_groups, True),
        ):
            for model_group, main_group in zip(models, mains, strict=True):
                for model_param, main in zip(model_group, main_group, strict=True):
                    end = start + main.numel()
                    first = part._get_model_param_range_map(model_param)["param"].start
                    yield _Entry(names[model_param], model_param, first, part.optimizer, main, owned, slice(start, end))
                    start = end
