"""The trainer's end of the weight sync: which pieces this rank sends, agreed with the others."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from rljob_api import derived
from rljob_api.spec import RLJobSpec
from rljob_worker.models.convert import Parallel, hf_manifest, local_pieces
from rljob_worker.trainer.rank import Rank
from rljob_worker.weightsync.plan import PieceGeometry, build_plan
from rljob_worker.weightsync.sender import WeightSender


def build_sender(rank: Rank, spec: RLJobSpec, folder: str) -> WeightSender:
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
    plan = build_plan(
        hf_manifest(rank.config),
        {producer: everyone[producer] for producer in range(first, min(first + per_node, place.world_size))},
        dtype=rank.parameters[0].dtype,
        consumers=derived.engines_per_node(spec),
        bucket_bytes=spec.weight_sync.bucket_bytes,
    )
    return WeightSender(pieces, plan, producer=place.rank, folder=folder)


def _in_node(place: Parallel, spec: RLJobSpec) -> Parallel:
    """The place with replicas counted in its node, so that one replica's pieces in each node are primary."""
    per_node = derived.devices_per_node(spec)
    return replace(
        place,
        dp_rank=place.dp_rank % max(1, per_node // place.tp_size),
        expert_dp_rank=place.expert_dp_rank % max(1, per_node // place.ep_size),
    )
