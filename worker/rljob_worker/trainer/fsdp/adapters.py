"""Adapters of a model that is divided over ranks: switched off, put together, and merged into a rank's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rljob_worker.models.adapters import (
    A,
    B,
    adapters_of,
    adapters_off,
    base_digests,
    first_a,
    merged,
    rows_digest,
    scaled,
    scaled_product,
)
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.trainer.fsdp.pieces import rows_of
from rljob_worker.trainer.fsdp.placement import Shards
from rljob_worker.trainer.rank_backend import Rounding


class ShardedAdapters:
    """The adapters of one rank.

    Args:
        model: with adapters, sharded and placed.
        shards: its rows here.
        layout: this rank's.
        group: of the ranks that divide a copy.
        seed: of the values that adapters begin with.

    Attributes:
        base: digest of each parameter that is not trained.
    """

    def __init__(
        self, model: nn.Module, shards: Shards, layout: ParallelLayout, group: dist.ProcessGroup, seed: int
    ) -> None:
        self._modules = adapters_of(model)
        self._shards, self._layout, self._group = shards, layout, group
        self._whole: dict[str, Tensor] = {}
        self._rounding: dict[str, Rounding] = {}
        self.base: dict[str, str] = {}
        for name in self._modules:
            self._begin(f"{name}.{A}", seed)

    @torch.no_grad()
    def _begin(self, name: str, seed: int) -> None:
        rows, mine = self._shards.trained[name], rows_of(self._shards.sizes[name], self._layout)
        rows.copy_(first_a(name, (self._shards.sizes[name], *rows.shape[1:]), seed)[mine.start : mine.stop])

    def digest_base(self) -> None:
        """Set `base` to that of the weights that are here; collective."""
        own = {
            name: rows_digest(rows, rows_of(self._shards.sizes[name], self._layout).start)
            for name, rows in self._shards.frozen.items()
        }
        everyone: list[dict[str, int]] = [own]
        if self._layout.world_size > 1:
            everyone = [{} for _ in range(self._layout.world_size)]
            dist.all_gather_object(everyone, own)
        copy = everyone[: self._layout.shards]
        self.base = base_digests({name: sum(part[name] for part in copy) % 2**64 for name in own})

    def off(self) -> AbstractContextManager[None]:
        """Inside, the model is the one that training began with."""
        return adapters_off(self._modules.values())

    @property
    def merged_rows(self) -> dict[str, Callable[[], Tensor]]:
        """Functions that give this rank's rows of W + scale B A, by the name of W; only inside of `gathered`."""
        return {f"{name}.weight": _Merge(self, name) for name in self._modules}

    @property
    def scaled_rows(self) -> dict[str, Callable[[], Tensor]]:
        """Functions that give this rank's rows of scale B, by the name of B."""
        return {f"{name}.{B}": _Scale(self, name) for name in self._modules}

    @torch.no_grad()
    def scale(self, name: str) -> Tensor:
        """This rank's rows of a module's scale B."""
        return scaled(self._shards.trained[f"{name}.{B}"], self._modules[name].scale)

    @contextmanager
    def gathered(self) -> Iterator[Rounding]:
        """Around the hand-over of merged rows; collective where it begins. What rounding lost is there at its end."""
        total = Rounding()
        self._whole, self._rounding = self._gather(), {}
        try:
            yield total
        finally:
            self._whole = {}
        for each in self._rounding.values():
            total.change += each.change
            total.lost += each.lost

    @torch.no_grad()
    def merge(self, name: str) -> Tensor:
        """This rank's rows of a module's merged weights, to the bit as a pass computes with them.

        The product is that of the whole module, as there: a product of fewer rows may be added up in another order.
        """
        if not self._whole:
            raise RuntimeError(f"{name}: merged weights are asked for outside of a hand-over")
        a, b = self._whole[f"{name}.{A}"], self._whole[f"{name}.{B}"]
        weight = self._shards.rows[f"{name}.weight"]
        mine = rows_of(len(b), self._layout)
        change = scaled_product(a, b, self._modules[name].scale)[mine.start : mine.stop]
        rows = merged(weight, change)
        lost = (change - (rows.float() - weight.float())).abs_().sum(dtype=torch.float64)
        self._rounding[name] = Rounding(float(change.abs().sum(dtype=torch.float64)), float(lost))
        return rows

    def _gather(self) -> dict[str, Tensor]:
        """All of A and B, fp32, in one exchange."""
        trained, sizes = self._shards.trained, self._shards.sizes
        own = torch.cat([rows.detach().flatten() for rows in trained.values()])
        ranks = [replace(self._layout, rank=rank) for rank in range(self._layout.shards)]
        counts = [_counts(trained, sizes, at) for at in ranks]
        parts = [own]
        if len(ranks) > 1:
            padded = own.new_zeros(max(sum(count.values()) for count in counts))
            padded[: own.numel()] = own
            parts = [torch.empty_like(padded) for _ in ranks]
            dist.all_gather(parts, padded, group=self._group)
        cut = [part[: sum(count.values())].split(list(count.values())) for part, count in zip(parts, counts)]
        return {
            name: torch.cat(of_ranks).view(sizes[name], *rows.shape[1:])
            for (name, rows), of_ranks in zip(trained.items(), zip(*cut))
        }


@dataclass(frozen=True, slots=True)
class _Merge:
    adapters: ShardedAdapters
    name: str

    def __call__(self) -> Tensor:
        return self.adapters.merge(self.name)


@dataclass(frozen=True, slots=True)
class _Scale:
    adapters: ShardedAdapters
    name: str

    def __call__(self) -> Tensor:
        return self.adapters.scale(self.name)


def _counts(trained: Mapping[str, Tensor], sizes: Mapping[str, int], at: ParallelLayout) -> dict[str, int]:
    """Elements of a rank's rows."""
    return {name: len(rows_of(sizes[name], at)) * rows.shape[1:].numel() for name, rows in trained.items()}
