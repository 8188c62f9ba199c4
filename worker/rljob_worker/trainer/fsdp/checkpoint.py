"""Saving and loading one FSDP rank's training state."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from rljob_api.json_types import Json
from rljob_api.spec import TrainingBackend
from rljob_api.wire.values import block
from rljob_worker.models.adapters import check_base
from rljob_worker.trainer.backend import Loaded
from rljob_worker.trainer.checked_file import CheckedFile
from rljob_worker.trainer.fsdp.pieces import pieces_of_rows
from rljob_worker.trainer.fsdp.rank_state import RankState
from rljob_worker.trainer.random_states import random_states, restore_random_states
from rljob_worker.trainer.saved_state import (
    BASE,
    LORA,
    MODEL_PREFIX,
    SavedState,
    adapters_named,
    critic_format,
    open_rank_file,
    saved_format,
    state_metadata,
)
from rljob_worker.trainer.state_file import POLICY, StateReader, path_of, write_state

_MOMENTS = ("exp_avg.", "exp_avg_sq.")
_STEP = "step."


def save_rank(rank: RankState, folder: str, *, updates: int, precision: str) -> CheckedFile:
    """Write this rank's file, asleep or awake, and sync it.

    `model.`, `exp_avg.`, `exp_avg_sq.` and transformers' name are its rows of a parameter and of Adam's moments,
    float32; `step.` counts updates; `rng.` are the generators' states, the only ones of ranks that hold further copies.
    The critic's file has none. What is frozen has no moments. With adapters they are the only parameters; the metadata
    have digests of all others.
    """
    tensors = {} if rank.layout.rank >= rank.layout.shards else _tensors(rank)
    generators = random_states(rank.device) if rank.stem == POLICY else {}
    readable = rank.memory.readable if rank.memory is not None else torch.Tensor.detach
    return write_state(
        path_of(folder, rank.layout.rank, rank.stem),
        {name: readable(tensor) for name, tensor in tensors.items()} | generators,
        state_metadata(
            TrainingBackend.FSDP, rank.layout, updates=updates, precision=precision, adapters=_adapters(rank)
        ),
    )


def load_rank(rank: RankState, folder: str, *, precision: str) -> Loaded:
    """Read a checkpoint into the awake model and optimizer: this rank's rows, from files of any layout or backend.

    Raises:
        ValueError: no file, a damaged one, or one of another precision or model; nothing is changed when the precision,
            the adapters or their base differ.
    """
    own = open_rank_file(folder, TrainingBackend.FSDP, rank.layout, precision, rank.lora, rank.stem)
    if rank.adapters is not None:
        saved = block(own.reader.metadata.get(BASE), f"{own.reader.path}: {BASE}")
        check_base(saved, rank.adapters.base, str(own.reader.path), str(rank.model_folder))
    if own.resharded:
        format_of = saved_format if rank.stem == POLICY else critic_format
        _load_resharded(rank, SavedState(folder, partial(format_of, model_folder=rank.model_folder), rank.stem))
        return Loaded(own.updates, resharded=own.resharded)
    reader = own.reader
    first = rank.layout.rank % rank.layout.shards
    values = reader if first == rank.layout.rank else StateReader(path_of(folder, first, rank.stem))
    for name, tensor in _tensors(rank).items():
        values.read_into(name, tensor)
    if rank.stem == POLICY:
        restore_random_states(reader, rank.device)
    return Loaded(own.updates)


@torch.no_grad()
def _load_resharded(rank: RankState, saved: SavedState) -> None:
    pieces = partial(pieces_of_rows, views=rank.saved_views, sizes=rank.shards.sizes, layout=rank.layout)
    saved.fill(saved.weights, pieces(_saved(rank)))
    states = rank.optimizer.states
    for prefix in _MOMENTS:
        moments = {name: getattr(state, prefix.removesuffix(".")) for name, state in states.items()}
        saved.fill(prefix, pieces(moments))
    for name, rows in rank.shards.trained.items():
        states[name].step.fill_(saved.updates_of(name, pieces({name: rows})))


def _saved(rank: RankState) -> dict[str, Tensor]:
    """All rows, a frozen tower's too; of adapters and their base, the adapters'."""
    return rank.shards.rows if rank.adapters is None else rank.shards.trained


def _tensors(rank: RankState) -> dict[str, Tensor]:
    tensors = {MODEL_PREFIX + name: rows for name, rows in _saved(rank).items()}
    for name, state in rank.optimizer.states.items():
        tensors |= {f"exp_avg.{name}": state.exp_avg, f"exp_avg_sq.{name}": state.exp_avg_sq, _STEP + name: state.step}
    return tensors


def _adapters(rank: RankState) -> dict[str, Json]:
    if rank.lora is None or rank.adapters is None:
        return {}
    return {LORA: adapters_named(rank.lora), BASE: dict(rank.adapters.base)}
