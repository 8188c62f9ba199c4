"""A Hugging Face checkpoint folder, judged by its files' headers and some of its numbers before anything is started."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from rljob_api.spec import LoraSpec
from rljob_worker.errors import UserError
from rljob_worker.models.hf_io import check_tensor_names, open_tensors
from rljob_worker.models.trained import TrainedModel, checkpoint_tensors
from rljob_worker.models.transformers_model import TransformersModel, elements
from rljob_worker.models.weight_files import names_by_file, tensor_files

_DTYPES = ("F32", "BF16", "F16")
_SAMPLED = 4096
"""Numbers of a tensor that are looked at, at its beginning and at its end."""


def check_hf_weights(folder: Path, model: TrainedModel) -> None:
    """Refuse weights that the trainers would refuse minutes later, or that hold NaN.

    Every tensor's name, file, shape and dtype is compared with the config; of each, up to 2 x 4,096 numbers are read.

    Raises:
        UserError: naming tensor and file.
    """
    files, tensors = tensor_files(folder), checkpoint_tensors(model)
    check_tensor_names(files, tensors, f"{model.model_type} model", folder)
    shapes = dict(tensors.trained)
    shapes |= {name: shapes[table] for name, table in tensors.tied if table in shapes}
    for path, names in names_by_file(files).items():
        with open_tensors(path) as file:
            for name in names:
                if name not in shapes:
                    continue
                tensor = file.get_slice(name)
                shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
                if shape != shapes[name]:
                    raise UserError(f"{path}: tensor {name} has shape {shape}; config.json says {shapes[name]}")
                if dtype not in _DTYPES:
                    raise UserError(f"{path}: tensor {name} is of type {dtype}; {', '.join(_DTYPES)} are read")
                rows = max(1, _SAMPLED // max(1, math.prod(shape[1:])))
                for part in (tensor[:rows], tensor[-rows:]):
                    if not bool(torch.isfinite(part).all()):
                        raise UserError(f"{path}: tensor {name} holds numbers that are not finite")


def checkpoint_bytes(model: TrainedModel, precision: str, lora: LoraSpec | None = None) -> int:
    """Bytes of a checkpoint: fp32 weights and Adam's two moments in fp32; Megatron's has its bf16 weights too.

    With adapters these are the weights; UserError names a target that matches nothing.
    """
    if lora is not None and isinstance(model, TransformersModel):
        return 12 * sum(elements(shapes) for shapes in model.adapters(lora))
    parameters = sum(math.prod(shape) for _, shape in checkpoint_tensors(model).trained)
    if isinstance(model, TransformersModel):
        # What is frozen has no moments.
        return 12 * parameters - 8 * elements(model.frozen)
    both = precision == "bf16"
    return parameters * (4 + 4 + 4 + (2 if both else 0))
