"""Saving and loading one rank's training state."""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.wire.values import block, whole
from rljob_worker.trainer.checked_file import CheckedFile
from rljob_worker.trainer.megatron.rank_state import RankState
from rljob_worker.trainer.state_file import StateReader, path_of, write_state

FORMAT = 1
MODEL_PREFIX = "model."


def save_rank(rank: RankState, folder: str, *, updates: int, precision: str) -> CheckedFile:
    """Write this rank's file, asleep or awake, and sync it.

    `model.<Megatron name>` are the parameters; `exp_avg.`, `exp_avg_sq.` and, in bf16 training, `master.` hold the flat
    part of each that this rank updates; `rng.` the generators' states.
    """
    readable = rank.readable
    tensors = {MODEL_PREFIX + name: readable(tensor) for name, tensor in rank.named_parameters().items()}
    tensors |= {name: readable(tensor) for name, tensor in _optimizer_tensors(rank).items()}
    tensors |= _rng_states(rank)
    return write_state(
        path_of(folder, rank.layout.rank),
        tensors,
        {
            "format": FORMAT,
            "updates": updates,
            "precision": precision,
            "coordinates": rank.layout.coordinates(),
        },
    )


def load_rank(rank: RankState, folder: str, *, precision: str) -> int:
    """Read this rank's file into the awake model and optimizer; returns the optimizer updates done so far.

    Raises:
        ValueError: no file, a damaged one, or one of another layout, precision or model; nothing is changed when the
            layout or the precision differ.
    """
    reader = StateReader(path_of(folder, rank.layout.rank))
    _check(reader, rank, precision)
    for name, tensor in rank.named_parameters().items():
        reader.read_into(MODEL_PREFIX + name, tensor)
    for name, tensor in _optimizer_tensors(rank).items():
        reader.read_into(name, tensor)
    _set_rng_states(reader, rank)
    return whole(reader.metadata["updates"], f"{reader.path}: updates")


def _check(reader: StateReader, rank: RankState, precision: str) -> None:
    saved = reader.metadata
    if saved.get("format") != FORMAT:
        raise ValueError(f"{reader.path}: state format {saved.get('format')}, this version reads {FORMAT}")
    here = rank.layout.coordinates()
    there = block(saved["coordinates"], f"{reader.path}: coordinates")
    different = [
        f"{name} {there.get(name)} there, {value} here" for name, value in here.items() if there.get(name) != value
    ]
    if saved["precision"] != precision:
        different.append(f"training.precision {saved['precision']} there, {precision} here")
    if different:
        raise ValueError(
            f"{reader.path}: was saved with another parallel layout or precision ({'; '.join(different)}); resume with "
            "the one of the checkpoint, or export it and start a new job from the export"
        )


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

    states = {"rng.torch": torch.get_rng_state()}
    device = rank.parameters[0].device
    if device.type != "cpu":
        states["rng.device"] = torch.get_device_module(device).get_rng_state(device)
    tracker = get_cuda_rng_tracker()
    return states | {f"rng.megatron.{name}": state for name, state in tracker.get_states().items()}


def _set_rng_states(reader: StateReader, rank: RankState) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.set_rng_state(reader.read("rng.torch"))
    device = rank.parameters[0].device
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(reader.read("rng.device"), device)
    tracker = get_cuda_rng_tracker()
    tracker.set_states({name: reader.read(f"rng.megatron.{name}") for name in tracker.get_states()})
