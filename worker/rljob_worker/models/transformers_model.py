"""Shape of any model that transformers builds and vLLM serves: what FSDP trains, seen without its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import nn

from rljob_api.spec import LoraSpec
from rljob_worker.models.adapters import A, B, LinearModule, adapted_modules, linear_modules
from rljob_worker.models.checkpoint_views import called_as, checkpoint_views
from rljob_worker.models.facts import ModelFacts, facts_of, hf_config, hf_source
from rljob_worker.models.hf_model import build_hf_model, gathered_apart, packs_rows, row_obstacle, tied_names, tower
from rljob_worker.models.manifest import CheckpointTensors
from rljob_worker.models.served import check_served
from rljob_worker.models.weight_files import files_there

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersModel(ModelFacts):
    """Shape of a model that FSDP trains; sizes are in elements."""

    config: str
    """Config as in `config.json`: transformers builds the model of it."""
    tensors: CheckpointTensors
    units: tuple[Shapes, ...]
    """Parameters of what is gathered together: each layer, then an untied embedding and head; each layer is alone."""
    root: Shapes
    """Parameters that are in none of them."""
    frozen: Shapes
    """Parameters of `root` that no update changes: a tower for pictures."""
    row_obstacle: str | None
    """Why ranks cannot divide the tokens of its rows (`hf_model.row_obstacle`)."""
    linear: tuple[LinearModule, ...]
    """Modules of the layers that can have adapters."""

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, object]) -> TransformersModel:
        """Read the config of a checkpoint folder, or a config given as a dict.

        Raises:
            UserError: no readable config, or a model that transformers or vLLM does not have or that FSDP cannot
                train; names it.
        """
        raw, where = hf_source(source)
        model = build_hf_model(raw if isinstance(source, Mapping) else source)
        check_served(raw, where)
        apart = gathered_apart(model)
        inside = {id(parameter) for module in apart for parameter in module.parameters()}
        seeing = tower(model) and not isinstance(source, Mapping)
        files = files_there(Path(cast("str | Path", source))) if seeing else {}
        views = called_as(checkpoint_views(model), files)
        return cls(
            **facts_of(raw, where, hf_config(raw, where)),
            config=json.dumps(dict(raw)),
            tensors=CheckpointTensors(tuple((view.name, view.shape) for view in views), tied_names(model)),
            units=tuple(_shapes(module) for module in apart),
            root=tuple(tuple(p.shape) for p in model.parameters() if id(p) not in inside),
            frozen=tuple(tuple(parameter.shape) for parameter in tower(model)),
            row_obstacle=row_obstacle(model, packed=packs_rows(raw)),
            linear=linear_modules(model),
        )

    @property
    def parameters(self) -> Shapes:
        """Shapes of all parameters of the model."""
        return tuple(shape for unit in (*self.units, self.root) for shape in unit)

    def adapters(self, lora: LoraSpec | None) -> tuple[Shapes, ...]:
        """The parameters of each layer's adapters, none where there are none; UserError names a target that matches
        nothing."""
        if lora is None:
            return ()
        chosen = adapted_modules(self.linear, lora, f"this {self.model_type} model")
        return tuple(
            tuple(shape for module in chosen if module.layer == layer for shape in module.adapter(lora.rank))
            for layer in range(self.num_layers)
        )


def adapter_tensors(model: TransformersModel, lora: LoraSpec) -> list[tuple[str, tuple[int, int]]]:
    """Name and shape of each tensor of a model's adapters."""
    chosen = adapted_modules(model.linear, lora, f"this {model.model_type} model")
    return [
        (f"{module.name}.{which}", shape)
        for module in chosen
        for which, shape in zip((A, B), module.adapter(lora.rank), strict=True)
    ]


def elements(shapes: Shapes) -> int:
    """Number of elements of some parameters."""
    return sum(math.prod(shape) for shape in shapes)


def _shapes(module: nn.Module) -> Shapes:
    return tuple(tuple(parameter.shape) for parameter in module.parameters())
