"""Saving and loading one rank's training state."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from rljob_api.spec import TrainingBackend
from rljob_worker.trainer.backend import Loaded
from rljob_worker.trainer.checked_file import CheckedFile
from rljob_worker.trainer.megatron.models.convert import local_pieces
from rljob_worker.trainer.megatron.rank_state import RankState
from rljob_worker.trainer.random_states import random_states, restore_random_states
from rljob_worker.trainer.saved_state import (
    MODEL_PREFIX,
    SavedState,
    critic_format,
    open_rank_file,
    saved_format,
    state_metadata,
)
from rljob_worker.trainer.state_file import POLICY, StateReader, path_of, write_state


def save_rank(rank: RankState, folder: str, *, updates: int, precision: str) -> CheckedFile:
    """Write this rank's file, asleep or awake, and sync it.

    `model.<Megatron name>` are the parameters; `exp_avg.`, `exp_avg_sq.` and, in bf16 training, `master.` hold the flat
    part of each that this rank updates; `rng.` the generators' states, which the critic's file has not.
    """
    readable = rank.readable
    tensors = {MODEL_PREFIX + name: readable(tensor) for name, tensor in rank.named_parameters().items()}
    tensors |= {name: readable(tensor) for name, tensor in _optimizer_tensors(rank).items()}
    if rank.stem == POLICY:
        tensors |= _rng_states(rank)
    return write_state(
        path_of(folder, rank.layout.rank, rank.stem),
        tensors,
        state_metadata(TrainingBackend.MEGATRON, rank.layout, updates=updates, precision=precision),
    )


def load_rank(rank: RankState, folder: str, *, precision: str) -> Loaded:
    """Read a checkpoint into the awake model and optimizer: this rank's file, or its part of all of another layout.

    Raises:
        ValueError: no file, a damaged one, or one of another precision or model; nothing is changed when the precision
            differs.
    """
    own = open_rank_file(folder, TrainingBackend.MEGATRON, rank.layout, precision, stem=rank.stem)
    if own.resharded:
        format_of = saved_format if rank.stem == POLICY else critic_format
        _load_resharded(rank, SavedState(folder, partial(format_of, model_folder=rank.model_folder), rank.stem))
        return Loaded(own.updates, resharded=own.resharded)
    reader = own.reader
    for name, tensor in rank.named_parameters().items():
        reader.read_into(MODEL_PREFIX + name, tensor)
    for name, tensor in _optimizer_tensors(rank).items():
        reader.read_into(name, tensor)
    if rank.stem == POLICY:
        _set_rng_states(reader, rank)
    return Loaded(own.updates)


@torch.no_grad()
def _load_resharded(rank: RankState, saved: SavedState) -> None:
    parameters = rank.named_parameters()
    saved.fill(MODEL_PREFIX, local_pieces(parameters, rank.config, rank.layout))
    for shard in rank.state.shards:
        parameter = parameters[shard.name]
        part = slice(shard.start, shard.start + shard.exp_avg.numel())
        state = torch.zeros(parameter.shape, dtype=torch.float32)
        pieces = local_pieces({shard.name: state}, rank.config, rank.layout)
        shard.step.fill_(saved.updates_of(shard.name, pieces))
        for prefix, target in (("exp_avg.", shard.exp_avg), ("exp_avg_sq.", shard.exp_avg_sq)):
            saved.fill(prefix, pieces)
            target.copy_(state.flatten()[part])
        if rank.state.owns_masters:
            # Rows that only fill up the vocabulary are in no checkpoint.
            state.copy_(parameter)
            saved.fill(saved.weights, pieces)
            shard.master.copy_(state.flatten()[part])


def _optimizer_tensors(rank: RankState) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard in rank.state.shards:
        tensors[f"exp_avg.{shard.name}"] = shard.exp_avg
        tensors[f"exp_avg_sq.{shard.name}"] = shard.exp_avg_sq
        tensors[f"step.{shard.name}"] = shard.step
        if rank.state.owns_masters:
            tensors[f"master.{shard.name}"] = shard.master
    return tensors


def _rng_states(rank: RankState) -> dict[str, Tensor]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracked = get_cuda_rng_tracker().get_states()
    own = {f"rng.megatron.{name}": state for name, state in tracked.items()}
    return random_states(rank.parameters[0].device) | own


def _set_rng_states(reader: StateReader, rank: RankState) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    restore_random_states(reader, rank.parameters[0].device)
    tracker = get_cuda_rng_tracker()
    tracker.set_states({name: reader.read(f"rng.megatron.{name}") for name in tracker.get_states()})
