"""A model's shards in memory that sleeps: nothing on meta or elsewhere on the host is moved to where it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.architectures import ARCHITECTURES
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rljob_worker.memory.arena import Arena
from rljob_worker.models.hf_model import build_hf_model
from rljob_worker.trainer.fsdp.model import ShardedModel
from rljob_worker.trainer.fsdp.placement import place_shards


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh.from_group(dist.new_group([0]), "cpu")
    dist.destroy_process_group()


class Moves(TorchDispatchMode):
    """Operations that read one tensor into another or onto another device, and those that leave meta."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.from_meta: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        name = func.overloadpacket.__name__
        if any(tensor.is_meta for tensor in given) and any(not tensor.is_meta for tensor in made):
            self.from_meta.append(name)
        if name in ("_to_copy", "copy_", "clone") and not given[-1].is_meta:
            self.elements += given[-1].numel()
        return result


def test_a_tensor_on_meta_or_on_the_host_never_moves(mesh: DeviceMesh) -> None:
    """Casts and copies of parameters are what runs out of memory. A shard with fewer rows is padded, while it is 0."""
    with Moves() as moves:
        model = build_hf_model(ARCHITECTURES["qwen3_moe"])
        built = moves.elements
        ShardedModel(model, mesh, torch.float32, recompute=False)
        shards = place_shards(model, nullcontext, torch.device("cpu"))
    parameters = sum(rows.numel() for rows in shards.rows.values())
    assert moves.from_meta == []
    assert moves.elements == built, "nothing is copied into the shards"
    assert built < parameters / 100, "positions and frequencies alone"
    assert all(bool((rows == 0).all()) for rows in shards.rows.values())


def test_a_model_with_parameters_elsewhere_is_not_placed(mesh: DeviceMesh) -> None:
    model = build_hf_model(ARCHITECTURES["llama"])
    model.get_input_embeddings().weight = torch.nn.Parameter(torch.zeros(67, 128))
    ShardedModel(model, mesh, torch.float32, recompute=False)
    with pytest.raises(RuntimeError, match=r"model.embed_tokens.weight is no shard on meta: it would have to be moved"):
        place_shards(model, nullcontext, torch.device("cpu"))


def test_shards_lie_in_the_region_and_ties_stay(mesh: DeviceMesh) -> None:
    arena = Arena(2**30)
    model = build_hf_model(ARCHITECTURES["llama_tied"])
    ShardedModel(model, mesh, torch.float32, recompute=False)
    shards = place_shards(model, arena.region, torch.device("cpu"))
    assert all(arena.contains(rows) for rows in shards.rows.values())
    head = model.get_output_embeddings().weight
    assert isinstance(head, DTensor)
    assert head is model.get_input_embeddings().weight
    shards.rows["model.embed_tokens.weight"].fill_(1)
    assert bool((head.to_local() == 1).all())
