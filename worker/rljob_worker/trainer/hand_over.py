"""The trainer's end of the weight sync: which pieces this rank sends, agreed with the others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

from rljob_api import derived
from rljob_api.spec import RLJobSpec
from rljob_worker.devices import Device
from rljob_worker.models.convert import Parallel, hf_manifest, local_pieces
from rljob_worker.trainer.rank import Rank
from rljob_worker.weightsync.exchange import Exchange
from rljob_worker.weightsync.plan import PieceGeometry, build_plan
from rljob_worker.weightsync.sender import WeightSender


def build_sender(rank: Rank, spec: RLJobSpec, device: Device, folder: str) -> WeightSender:
    """Agree with the ranks of this node who sends what to its engines, and make this rank's sender.

    Collective over all ranks, awake. Ranks are numbered node by node, and each node holds whole copies of the model.
    """
    here = _in_node(Parallel.current(), spec)
    pieces = [piece for piece in local_pieces(rank.ddp.module, rank.config, here) if piece.primary]
    mine = [PieceGeometry.of(piece) for piece in pieces]
    everyone: list[list[PieceGeometry]] = [mine]
    place = rank.coordinates
    if place.world_size > 1:
        everyone = [[] for _ in range(place.world_size)]
        dist.all_gather_object(everyone, mine)
    per_node = derived.devices_per_node(spec)
    first = place.rank // per_node * per_node
    neighbours = range(first, min(first + per_node, place.world_size))
    plan = build_plan(
        hf_manifest(rank.config),
        {producer: everyone[producer] for producer in neighbours},
        dtype=rank.parameters[0].dtype,
        consumers=derived.engines_per_node(spec),
        bucket_bytes=spec.weight_sync.bucket_bytes,
    )
    exchange = _exchange(rank, device, neighbours) if device.own_memory else None
    return WeightSender(pieces, plan, producer=place.rank, folder=folder, exchange=exchange)


def _exchange(rank: Rank, device: Device, neighbours: Sequence[int]) -> Exchange:
    """The trainers of this node, whose devices each have staging slots of their own; collective over all ranks."""

    def allocate(nbytes: int) -> torch.Tensor:
        with rank.memory.staging() if rank.memory is not None else nullcontext():
            return torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)

    world, size = rank.coordinates.world_size, len(neighbours)
    group = None
    with rank.groups.recording():
        # All ranks make all groups, in the same order.
        for first in range(0, world if size < world else 0, size):
            made = dist.new_group(list(range(first, first + size)))
            group = made if first == neighbours[0] else group
    return Exchange(device, neighbours, allocate, group)


def _in_node(place: Parallel, spec: RLJobSpec) -> Parallel:
    """The place with replicas counted in its node, so that one replica's pieces in each node are primary."""
    per_node = derived.devices_per_node(spec)
    return replace(
        place,
        dp_rank=place.dp_rank % max(1, per_node // place.tp_size),
        expert_dp_rank=place.expert_dp_rank % max(1, per_node // place.ep_size),
    )
