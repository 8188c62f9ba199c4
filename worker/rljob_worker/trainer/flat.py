"""All of a rank's training state as few flat tensors, so that it can sleep, be saved, swapped and rolled back whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Region = Callable[[str], AbstractContextManager[Any]]
"""`with region(tag)`: tensors created inside belong to the memory saver under that tag (`backup` or `discard`)."""


def move_buffers(ddp: Any, region: Region) -> list[Tensor]:
    """Put Megatron's flat parameter and gradient buffers into the memory saver; returns those of the parameters.

    Megatron allocates both in one constructor, but only parameters need their content kept during sleep. Call before
    the optimizer is built: it takes views of the parameters.
    """
    parameters = []
    for buffer in ddp.buffers + ddp.expert_parallel_buffers:
        with region("backup"):
            param_data = torch.zeros(buffer.numel, dtype=buffer.param_dtype, device=buffer.param_data.device)
        with region("discard"):
            grad_data = torch.zeros(buffer.numel, dtype=buffer.grad_dtype, device=buffer.grad_data.device)
        param_data.copy_(buffer.param_data)
        buffer.param_data, buffer.grad_data = param_data, grad_data
        for bucket in buffer.buckets:
            span = slice(bucket.offset, bucket.offset + bucket.grad_data.numel())
            bucket.param_data, bucket.grad_data = param_data[span], grad_data[span]
        for param, (start, end, _bucket) in buffer.param_index_map.items():
            param.data = param_data[start:end].view(param.shape)
            param.main_grad = grad_data[start:end].view(param.shape)
        parameters.append(param_data)
    return parameters


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one parameter that this data-parallel rank updates, and its Adam state; flat views."""

    name: str
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

    def __init__(self, optimizer: Any, ddp: Any, region: Region, *, on_host: bool = False) -> None:
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
            self.shards.append(Shard(entry.name, master, exp_avg, exp_avg_sq, step))

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
    inner: torch.optim.Optimizer
    main: Tensor
    owned: bool
    """Whether `main` is a copy of its own, and no view of the parameter."""
    span: slice
    """Its place in the flat tensors."""


def _entries(optimizer: Any, names: dict[Any, str]) -> Iterator[_Entry]:
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
                    yield _Entry(names[model_param], part.optimizer, main, owned, slice(start, end))
                    start = end


class Snapshot:
    """A copy of the state before a step of several updates, to go back to; its host memory is kept between steps."""

    def __init__(self, parameters: list[Tensor], state: OptimizerState) -> None:
        self._live = [*parameters, *state.flats, *(shard.step for shard in state.shards)]
        self._copy = [torch.empty_like(tensor, device="cpu") for tensor in self._live]

    def take(self) -> None:
        """Copy the present state."""
        self._move(self._live, self._copy)

    def restore(self) -> None:
        """Put the copied state back, bit for bit."""
        self._move(self._copy, self._live)

    @staticmethod
    @torch.no_grad()
    def _move(source: list[Tensor], target: list[Tensor]) -> None:
        for from_, to in zip(source, target, strict=True):
            to.copy_(from_)


class Reference:
    """The starting weights, kept on the host and put into the parameter buffers while it is needed."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters
        self._weights = [parameter.detach().to("cpu", copy=True) for parameter in parameters]
        self._set_aside = [torch.empty_like(weights) for weights in self._weights]

    def __enter__(self) -> None:
        for parameter, weights, aside in zip(self._parameters, self._weights, self._set_aside, strict=True):
            aside.copy_(parameter)
            parameter.copy_(weights)

    def __exit__(self, *_exc: object) -> None:
        for parameter, aside in zip(self._parameters, self._set_aside, strict=True):
            parameter.copy_(aside)
