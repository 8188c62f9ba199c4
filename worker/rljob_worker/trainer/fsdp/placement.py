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
    """This rank's rows of every parameter: contiguous fp32 tensors in the memory saver, by name, in model order.

    Attributes:
        rows: of each parameter; one without rows here has an empty tensor.
        sizes: rows of each whole parameter.
    """

    rows: dict[str, Tensor]
    sizes: dict[str, int]


def place_shards(model: nn.Module, region: Region, device: torch.device) -> Shards:
    """Give the shards of a model, which `fully_shard` left on meta, memory: zeros, to be loaded into.

    Nothing moves: parameters were never anywhere else, and what is on meta is replaced, not copied. Of the model only
    its buffers are brought to the device. A region does not see what is made inside of a DTensor, so one flat tensor is
    made in it and the model gets views. torch pads a shard that has fewer rows than others; it does so in the region.

    Raises:
        RuntimeError: a shard ended up elsewhere than in that memory.
    """
    even = [shard for shard in _shards(model) if _is_even(shard)]
    placed: dict[int, DTensor] = {}
    with region("backup"):
        flat = torch.zeros(sum(shard.to_local().numel() for shard in even), dtype=torch.float32, device=device)
        start = 0
        for shard in even:
            local = shard.to_local()
            placed[id(shard)] = _with_rows(shard, flat[start : start + local.numel()].view(local.shape))
            start += local.numel()

        def here(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DTensor):
                return tensor.to(device)
            if id(tensor) not in placed:
                placed[id(tensor)] = _with_rows(tensor, torch.zeros(tensor.to_local().shape, device=device))
            return placed[id(tensor)]

        model._apply(here)
    named = {name: shard for name, shard in model.named_parameters() if isinstance(shard, DTensor)}
    rows = {name: shard.to_local().detach() for name, shard in named.items()}
    for name, tensor in rows.items():
        if tensor.device != flat.device or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise RuntimeError(f"the shard of {name} is {tensor.dtype} on {tensor.device}, not float32 on {device}")
    return Shards(rows, {name: shard.shape[0] for name, shard in named.items()})


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
