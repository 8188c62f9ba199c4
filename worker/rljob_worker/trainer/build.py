"""Which training backend a job gets."""

from __future__ import annotations

import threading
from pathlib import Path

from rljob_api.spec import RLJobSpec, TrainingBackend
from rljob_worker.devices import Device
from rljob_worker.trainer.backend import TrainerBackend
from rljob_worker.trainer.rendezvous import Notices


def build_backend(
    spec: RLJobSpec,
    device: Device,
    *,
    rank: int,
    world_size: int,
    store: str,
    model_folder: Path,
    stop: threading.Event,
    notices: Notices,
) -> TrainerBackend:
    """Build this rank of the job's backend with the checkpoint's weights, awake; collective.

    Args:
        spec: the job.
        device: this rank's.
        rank: number of this rank.
        world_size: number of ranks.
        store: where the ranks meet.
        model_folder: Hugging Face folder with the starting weights.
        stop: set when a running pass is to end early.
        notices: what the ranks agree on over the store.
    """
    if spec.training.backend is TrainingBackend.FSDP:
        from rljob_worker.trainer.fsdp import rank_state as fsdp
        from rljob_worker.trainer.fsdp.backend import FsdpBackend

        rows = fsdp.build_rank_state(
            spec, device, rank=rank, world_size=world_size, store=store, model_folder=model_folder
        )
        return FsdpBackend(rows, spec, device, stop, notices)
    from rljob_worker.trainer.megatron.backend import MegatronBackend
    from rljob_worker.trainer.megatron.rank_state import build_rank_state, join_ranks

    joined = join_ranks(spec, device, rank=rank, world_size=world_size, store=store)
    state = build_rank_state(joined, spec, device, model_folder)
    return MegatronBackend(state, spec, device, stop, notices)
