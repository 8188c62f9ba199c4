"""A critic: the model of a checkpoint with a head of one number in the place of the vocabulary's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from rljob_worker.errors import UserError
from rljob_worker.models.checkpoint_views import CheckpointView, check_headers, checkpoint_views
from rljob_worker.models.config import ModelConfig
from rljob_worker.models.hf_io import check_tensor_names, tensor_shapes
from rljob_worker.models.hf_model import build_hf_model, parameters_on_meta, tied_names
from rljob_worker.models.manifest import HEAD as VOCABULARY_HEAD
from rljob_worker.models.manifest import CheckpointTensors, embedding, hf_manifest
from rljob_worker.models.weight_files import tensor_files

if TYPE_CHECKING:
    from rljob_worker.models.hf_model import HfModel

HEAD, BIAS = "score.weight", "score.bias"
"""The head's tensors in checkpoints of transformers' classes of classification, which value models are saved as."""


@dataclass(frozen=True, slots=True)
class ValueModel:
    """A critic without memory, and where its tensors are.

    Attributes:
        model: fp32 parameters on meta.
        views: of all its tensors; those of the head are called as in a checkpoint of a value model.
        files: tensor name -> file, of the folder that it begins with; those of a head are there only if that has one.
    """

    model: HfModel
    views: list[CheckpointView]
    files: dict[str, Path]


def build_value_model(folder: Path, *, attention: str = "sdpa") -> ValueModel:
    """The critic that begins with a checkpoint's layers, and with its head where that has one row.

    What a model does to its logits after the head, such as a cap, it does to values.

    Raises:
        UserError: no model of text, or tensors that are missing or of another shape; names the folder and the tensor.
    """
    files = tensor_files(folder)
    model = build_hf_model(folder, attention=attention)
    of_policy = {view.name for view in checkpoint_views(model)} | {name for name, _ in tied_names(model)}
    with parameters_on_meta():
        head = nn.Linear(model.get_output_embeddings().weight.shape[1], 1, bias=BIAS in files)
    model.set_output_embeddings(head)
    own = {id(head.weight): HEAD, id(head.bias): BIAS}
    called = {name: own[id(parameter)] for name, parameter in model.named_parameters() if id(parameter) in own}
    views = [replace(view, name=called.get(view.parameter, view.name)) for view in checkpoint_views(model)]
    there = [view for view in views if view.name in files or view.parameter not in called]
    here = {view.name for view in views}
    check_headers(there, tensor_shapes(files), str(folder), may_have=sorted(of_policy - here))
    return ValueModel(model, views, files)


def value_config(folder: Path) -> ModelConfig:
    """The critic that Megatron trains and that begins with a checkpoint's layers, and with its head as above.

    Raises:
        UserError: no model that Megatron trains, or tensors that are missing or of another shape; names the folder and
            the tensor.
    """
    files = tensor_files(folder)
    policy = ModelConfig.from_hf(folder)
    config = policy.critic((HEAD, BIAS) if BIAS in files else (HEAD,))
    there = tuple(
        (name, shape) for name, shape in hf_manifest(config) if name in files or name not in config.value_head
    )
    unused = ((VOCABULARY_HEAD, embedding(config)),)
    check_tensor_names(files, CheckpointTensors(there, unused, config.untrained), f"{config.model_type} model", folder)
    found = tensor_shapes({name: files[name] for name, _ in there})
    for name, shape in there:
        if found[name] != shape:
            raise UserError(f"{files[name]}: tensor {name} has shape {found[name]}, the model's is {shape}")
    return config
