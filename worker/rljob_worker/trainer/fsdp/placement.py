"""A model's shards in flat memory that can sleep."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rljob_worker.memory.sleeping import Region


@dataclass(frozen=True, slots=True)
class Shards:
    """This rank's rows of every parameter: contiguous tensors in the memory saver, by name, in model order.

    Attributes:
        rows: of each parameter; one without rows here has an empty tensor.
        sizes: rows of each whole parameter.
        trained: those of `rows` that updates change.
    """

    rows: dict[str, Tensor]
    sizes: dict[str, int]
    trained: dict[str, Tensor]

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The others."""
        return {name: rows for name, rows in self.rows.items() if name not in self.trained}


def place_shards(model: nn.Module, region: Region, device: torch.device) -> Shards:
    """Give the shards of a model, which `fully_shard` left on meta, memory: zeros, to be loaded into.

    Nothing moves: parameters were never anywhere else, and what is on meta is replaced, not copied. Of the model only
    its buffers are brought to the device. A region does not see what is made inside of a DTensor, so a flat tensor of
    each number format is made in it and the model gets views. torch pads a shard that has fewer rows than others; it
    does so in the region.

    Raises:
        RuntimeError: a shard ended up elsewhere than in that memory.
    """
    even = [shard for shard in _shards(model) if _is_even(shard)]
    placed: dict[int, DTensor] = {}
    with region("backup"):
        for dtype in dict.fromkeys(shard.dtype for shard in even):
            of_dtype = [shard for shard in even if shard.dtype == dtype]
            lengths = [shard.to_local().numel() for shard in of_dtype]
            flat = torch.zeros(sum(lengths), dtype=dtype, device=device)
            for shard, part in zip(of_dtype, flat.split(lengths), strict=True):
                placed[id(shard)] = _with_rows(shard, part.view(shard.to_local().shape))

        def here(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DTensor):
                return tensor.to(device)
            if id(tensor) not in placed:
                rows = torch.zeros(tensor.to_local().shape, dtype=tensor.dtype, device=device)
                placed[id(tensor)] = _with_rows(tensor, rows)
            return placed[id(tensor)]

        formats = {name: parameter.dtype for name, parameter in model.named_parameters()}
        model._apply(here)
    named = {name: shard for name, shard in model.named_parameters() if isinstance(shard, DTensor)}
    rows = {name: shard.to_local().detach() for name, shard in named.items()}
    for name, tensor in rows.items():
        if tensor.device.type != device.type or tensor.dtype != formats[name] or not tensor.is_contiguous():
            raise RuntimeError(
                f"the shard of {name} is {tensor.dtype} on {tensor.device}, not {formats[name]} on {device}"
            )
    return Shards(
        rows,
        {name: shard.shape[0] for name, shard in named.items()},
        {name: rows[name] for name, shard in named.items() if shard.requires_grad},
    )


def _shards(model: nn.Module) -> list[DTensor]:
    found: list[DTensor] = []
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or not parameter.to_local().is_meta:
            raise RuntimeError(f"{name} is no shard on meta: it would have to be moved")
        found.append(parameter)
    return found


def _is_even(shard: DTensor) -> bool:
    """Whether it has as many rows as the first rank's, and so is not padded."""
    ranks = math.prod(
        size for size, placement in zip(shard.device_mesh.shape, shard.placements) if placement.is_shard()
    )
    return shard.to_local().shape[0] == -(-shard.shape[0] // ranks)


def _with_rows(shard: DTensor, rows: Tensor) -> DTensor:
    return DTensor.from_local(
        rows, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
    )
