"""The trainer's end of the weight sync: which pieces this rank sends, agreed with the others."""

from __future__ import annotations

import torch.distributed as dist

from rljob_api import derived
from rljob_api.spec import RLJobSpec
from rljob_worker.models.convert import Parallel, hf_manifest, local_pieces
from rljob_worker.trainer.rank import Rank
from rljob_worker.weightsync.plan import PieceGeometry, build_plan
from rljob_worker.weightsync.sender import WeightSender


def build_sender(rank: Rank, spec: RLJobSpec, folder: str) -> WeightSender:
    """Agree with all ranks who sends what, and make this rank's sender; collective, awake."""
    pieces = [piece for piece in local_pieces(rank.ddp.module, rank.config, Parallel.current()) if piece.primary]
    mine = [PieceGeometry.of(piece) for piece in pieces]
    everyone: list[list[PieceGeometry]] = [mine]
    place = rank.coordinates
    if place.world_size > 1:
        everyone = [[] for _ in range(place.world_size)]
        dist.all_gather_object(everyone, mine)
    plan = build_plan(
        hf_manifest(rank.config),
        dict(enumerate(everyone)),
        dtype=rank.parameters[0].dtype,
        consumers=derived.engines(spec),
        bucket_bytes=spec.weight_sync.bucket_bytes,
    )
    return WeightSender(pieces, plan, producer=place.rank, folder=folder)
