"""Parts of Hugging Face tensors on ranks that divide parameters row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from rljob_worker.models.checkpoint_views import CheckpointView, RowsView
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.tensor_slice import Piece


def rows_of(size: int, layout: ParallelLayout) -> range:
    """The rows of a parameter of `size` rows that a rank has: as `torch.chunk` deals them, none where they run out."""
    each = -(-size // layout.shards)
    first = min(layout.rank % layout.shards * each, size)
    return range(first, min(first + each, size))


def pieces_of_rows(
    shard: Mapping[str, Tensor],
    views: Sequence[CheckpointView],
    sizes: Mapping[str, int],
    layout: ParallelLayout,
    *,
    computed: Mapping[str, Callable[[], Tensor]] = MappingProxyType({}),
) -> list[Piece]:
    """The parts of a checkpoint's tensors in a rank's rows; primary in the first copy of the parameters.

    Args:
        shard: the rows of some parameters, or values that belong to them one by one; contiguous.
        views: of all tensors.
        sizes: rows of each whole parameter.
        layout: the rank's.
        computed: of parameters whose rows are made when they are read, what makes them; contiguous.

    Raises:
        ValueError: a parameter is none of the model's, or has another number of rows.
    """
    for name, rows in shard.items():
        if name not in sizes:
            raise ValueError(f"{name} is no parameter of this model")
        if rows.shape[0] != len(rows_of(sizes[name], layout)):
            expected = len(rows_of(sizes[name], layout))
            raise ValueError(f"{name} has {rows.shape[0]} rows, rank {layout.rank} of this layout has {expected}")
    pieces = []
    for view in views:
        if view.parameter not in shard:
            continue
        mine = rows_of(sizes[view.parameter], layout)
        found = view.rows(mine.start, len(mine))
        if found is not None:
            place, inside = found
            make = computed.get(view.parameter)
            read = partial(inside.of, shard[view.parameter]) if make is None else partial(_read, inside, make)
            pieces.append(
                Piece(
                    hf_name=place.hf_name,
                    hf_shape=place.hf_shape,
                    dim=place.dim,
                    start=place.start,
                    length=place.length,
                    read=read,
                    view=read if make is None else None,
                    address=shard[view.parameter].data_ptr,
                    write=partial(_write, inside, shard[view.parameter]),
                    primary=layout.rank < layout.shards,
                )
            )
    return pieces


def _read(inside: RowsView, make: Callable[[], Tensor]) -> Tensor:
    return inside.of(make())


@torch.no_grad()
def _write(inside: RowsView, rows: Tensor, value: Tensor) -> None:
    inside.of(rows).copy_(value)
