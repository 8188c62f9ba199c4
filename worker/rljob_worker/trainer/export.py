"""From a checkpoint's per-rank states to one Hugging Face folder, without starting Megatron."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from rljob_api.spec import RolloutSpec
from rljob_worker.errors import UserError
from rljob_worker.models.config import ModelConfig
from rljob_worker.models.facts import read_hf_config
from rljob_worker.models.generation_config import write_generation_config
from rljob_worker.models.hf_io import copy_picture_files, save_hf_folder, untrained_tensors
from rljob_worker.tensor_slice import Piece
from rljob_worker.trainer.megatron.models.convert import assemble
from rljob_worker.trainer.saved_state import MODEL_PREFIX, layout_of, saved_format
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

    What is not trained, such as a vision tower, comes from the folder that training began with.

    Args:
        checkpoint: a complete `step-N` folder.
        model_folder: folder with the model's config.json and tokenizer.
        target: folder to write; must hold no weights yet.
        world_size: ranks that saved the checkpoint.
        rollout: sampling of the job, for `generation_config.json`.
        beginning: folder with the weights that training began with; not needed where all of them are trained.

    Raises:
        UserError: `target` holds weights, or the states do not fit the model.
    """
    config = ModelConfig.from_hf(model_folder)
    if config.untrained and beginning is None:
        raise ValueError(f"a {config.model_type} checkpoint is exported with what is not trained: give its beginning")
    try:
        trained = assemble(_pieces(checkpoint, model_folder, world_size), config)
        tensors = trained if beginning is None else itertools.chain(trained, untrained_tensors(beginning))
        hf_config = read_hf_config(model_folder)
        save_hf_folder(target, tensors, hf_config, model_folder)
        if beginning is not None:
            copy_picture_files(beginning, target)
    except ValueError as error:
        raise UserError(str(error)) from error
    write_generation_config(target, rollout, hf_config)
    _as_umask_says(target)


def _as_umask_says(folder: Path) -> None:
    """Whatever the files were made by: safetensors' are its owner's alone."""
    mask = os.umask(0)
    os.umask(mask)
    for entry in folder.rglob("*"):
        entry.chmod((0o777 if entry.is_dir() else 0o666) & ~mask)


def _pieces(checkpoint: Path, model_folder: Path, world_size: int) -> Iterator[Piece]:
    saved = saved_format(StateReader(path_of(checkpoint, 0)), model_folder)
    for rank in range(world_size):
        reader = StateReader(path_of(checkpoint, rank))
        names = [name for name in reader.names if name.startswith(MODEL_PREFIX)]
        shard = {name.removeprefix(MODEL_PREFIX): reader.read(name) for name in names}
        yield from saved.pieces_of(shard, layout_of(reader))
