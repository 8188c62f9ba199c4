"""Adam state of Megatron's distributed optimizers as few flat tensors that can sleep, be saved and rolled back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rljob_worker.memory.sleeping import Region
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
        self, optimizer: ChainedOptimizer, ddp: DistributedDataParallel, region: Region, *, on_host: bool = False
    ) -> None:
        """Take over the state of a new optimizer.

        Args:
            optimizer: Megatron's chained distributed optimizers.
            ddp: the model that they update.
            region: where the tensors sleep.
            on_host: they live in pinned host memory, and are on the device in `present` alone.
        """
        names = {param: name for name, param in ddp.module.named_parameters()}
        self._entries = list(_entries(optimizer, names))
        self._on_host = on_host
        total = sum(entry.main.numel() for entry in self._entries)
        count = 3 if any(entry.owned for entry in self._entries) else 2
        self._device = self._entries[0].main.device if self._entries else torch.device("cpu")
        home = torch.device("cpu") if on_host else self._device
        pinned = on_host and self._device.type != "cpu"
        with region("backup"):
            self.flats = [torch.zeros(total, dtype=torch.float32, device=home, pin_memory=pinned) for _ in range(count)]
            self._steps = torch.zeros(len(self._entries), dtype=torch.float32, device=home)
        for entry in self._entries:
            if entry.owned:
                self.flats[2][entry.span].copy_(entry.main)
        self._work_on(self.flats, self._steps)
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
    def present(self) -> Iterator[None]:
        """Around an update: the state is on the device."""
        if not self._on_host:
            yield
            return
        homes = [*self.flats, self._steps]
        here = [home.to(self._device, copy=True) for home in homes]
        self._work_on(here[:-1], here[-1])
        try:
            yield
        finally:
            for home, tensor in zip(homes, here, strict=True):
                home.copy_(tensor)
            self._work_on(self.flats, self._steps)

    def _work_on(self, flats: list[Tensor], steps: Tensor) -> None:
        """Have the optimizers compute with these tensors."""
        for entry, step in zip(self._entries, steps, strict=True):
            span = entry.span
            if entry.owned:
                # A gradient is of one update, and where its master is.
                entry.main.grad = None
                entry.main.data = flats[2][span]
            entry.inner.state[entry.main].update(step=step, exp_avg=flats[0][span], exp_avg_sq=flats[1][span])


@dataclass(frozen=True, slots=True)
class _Entry:
    """A shard as Megatron has it."""

    name: str
    start: int
    """Its first element in the flat parameter."""
    inner: torch.optim.Optimizer
    main: Tensor
    owned: bool
    """Whether `main` is a copy of its own, and no view of the parameter."""
    span: slice
    """Its place in the flat tensors."""


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
                    yield _Entry(names[model_param], first, part.optimizer, main, owned, slice(start, end))
                    start = end
