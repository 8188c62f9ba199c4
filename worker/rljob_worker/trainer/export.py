"""From a checkpoint's per-rank states to one Hugging Face folder, without starting a trainer."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from rljob_api.spec import LoraSpec, Precision, RolloutSpec
from rljob_api.wire.values import block
from rljob_worker.errors import UserError
from rljob_worker.models.facts import read_hf_config
from rljob_worker.models.generation_config import write_generation_config
from rljob_worker.models.hf_io import copy_picture_files, save_hf_folder, untrained_tensors
from rljob_worker.models.merged_model import MergedModel, save_peft_folder
from rljob_worker.tensor_slice import Piece
from rljob_worker.trainer.assemble import assemble
from rljob_worker.trainer.saved_state import BASE, MODEL_PREFIX, SavedFormat, layout_of, saved_format
from rljob_worker.trainer.state_file import StateReader, path_of


def export_checkpoint(
    checkpoint: Path,
    model_folder: Path,
    target: Path,
    world_size: int,
    rollout: RolloutSpec,
    beginning: Path | None = None,
) -> None:
    """Write the weights of a checkpoint as a folder that `transformers` and vLLM load.

    What is not trained, such as a vision tower or the weights under adapters, comes from the folder that training began
    with.

    Args:
        checkpoint: a complete `step-N` folder.
        model_folder: folder with the model's config.json and tokenizer.
        target: folder to write; must hold no weights yet.
        world_size: ranks that saved the checkpoint.
        rollout: sampling of the job, for `generation_config.json`.
        beginning: folder with the weights that training began with; not needed where all of them are trained.

    Raises:
        UserError: `target` holds weights, or the states do not fit the model; or adapters, the weights of `beginning`.
    """
    saved = format_of(checkpoint, model_folder)
    if needs_beginning(saved) and beginning is None:
        raise ValueError(f"{checkpoint} is exported with what is not trained: give its beginning")
    try:
        tensors = _trained(checkpoint, saved, world_size)
        if saved.lora is not None and beginning is not None:
            tensors = _merged(checkpoint, beginning, saved.lora, dict(tensors))
        elif beginning is not None:
            tensors = itertools.chain(tensors, untrained_tensors(beginning, saved.untrained))
        hf_config = read_hf_config(model_folder)
        save_hf_folder(target, tensors, hf_config, model_folder)
        copy_picture_files(beginning or model_folder, target)
    except ValueError as error:
        raise UserError(str(error)) from error
    write_generation_config(target, rollout, hf_config)
    _as_umask_says(target)


def export_adapters(checkpoint: Path, model_folder: Path, target: Path, world_size: int, base: str) -> None:
    """Write the adapters of a checkpoint as a folder that PEFT loads; they belong to the model that is called `base`.

    Raises:
        UserError: the checkpoint has none, or `target` has some, or the states do not fit the model.
    """
    saved = format_of(checkpoint, model_folder)
    if saved.lora is None:
        raise UserError(f"{checkpoint}: has no adapters: the job has no training.lora")
    try:
        adapters = dict(assemble(_pieces(checkpoint, saved, world_size), saved.manifest))
    except ValueError as error:
        raise UserError(str(error)) from error
    save_peft_folder(target, model_folder, saved.lora, adapters, base)
    _as_umask_says(target)


def needs_beginning(saved: SavedFormat) -> bool:
    """Whether a whole model takes tensors from the folder that training began with."""
    return bool(saved.untrained) or saved.lora is not None


def _merged(
    checkpoint: Path, beginning: Path, lora: LoraSpec, adapters: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    reader = StateReader(path_of(checkpoint, 0))
    model = MergedModel(beginning, lora, adapters, torch.bfloat16 if _is_bf16(reader) else torch.float32)
    model.check(block(reader.metadata.get(BASE), f"{reader.path}: {BASE}"), str(checkpoint))
    return model.tensors()


def _as_umask_says(folder: Path) -> None:
    """Whatever the files were made by: safetensors' are its owner's alone."""
    mask = os.umask(0)
    os.umask(mask)
    for entry in folder.rglob("*"):
        entry.chmod((0o777 if entry.is_dir() else 0o666) & ~mask)


def format_of(checkpoint: Path, model_folder: Path) -> SavedFormat:
    """The format of a checkpoint of the model of a folder; UserError when it is damaged, or of a later version."""
    try:
        return saved_format(StateReader(path_of(checkpoint, 0)), model_folder)
    except ValueError as error:
        raise UserError(str(error)) from error


def _trained(checkpoint: Path, saved: SavedFormat, world_size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, as engines get them: a backend that keeps fp32 alone rounds them to the precision of training.
    Adapters stay fp32."""
    bf16 = _is_bf16(StateReader(path_of(checkpoint, 0))) and saved.lora is None
    for name, tensor in assemble(_pieces(checkpoint, saved, world_size), saved.manifest):
        yield name, tensor.to(torch.bfloat16) if bf16 else tensor


def _is_bf16(reader: StateReader) -> bool:
    return reader.metadata.get("precision") == Precision.BF16.value


def _pieces(checkpoint: Path, saved: SavedFormat, world_size: int) -> Iterator[Piece]:
    for rank in range(world_size):
        reader = StateReader(path_of(checkpoint, rank))
        names = [name for name in reader.names if name.startswith(MODEL_PREFIX)]
        shard = {name.removeprefix(MODEL_PREFIX): reader.read(name) for name in names}
        yield from saved.pieces_of(shard, layout_of(reader))
