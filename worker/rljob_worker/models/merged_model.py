"""Whole models and adapters' files, of what was trained beside weights that stayed as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rljob_api.spec import LoraSpec
from rljob_worker.errors import UserError
from rljob_worker.host.files import write_whole, writing
from rljob_worker.models.adapters import (
    A,
    B,
    LinearModule,
    adapted_modules,
    base_digests,
    check_base,
    linear_modules,
    merged,
    rows_digest,
    scaled_product,
)
from rljob_worker.models.checkpoint_views import CheckpointView, check_headers, checkpoint_views
from rljob_worker.models.hf_io import open_tensors, tensor_shapes
from rljob_worker.models.hf_model import build_hf_model, tied_names
from rljob_worker.models.weight_files import tensor_files

PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PEFT_MODEL = "base_model.model."


class MergedModel:
    """The model that adapters and the weights that they were trained on are together.

    Args:
        folder: the weights.
        lora: what the adapters are.
        adapters: them, whole, by parameter.
        dtype: number format that was computed with.

    Raises:
        UserError: weights of another model than the folder's config says.
    """

    def __init__(self, folder: Path, lora: LoraSpec, adapters: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        model = build_hf_model(folder)
        self._folder, self._adapters, self._scale, self._dtype = folder, adapters, lora.alpha / lora.rank, dtype
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._views: dict[str, list[CheckpointView]] = {}
        for view in (views := checkpoint_views(model)):
            self._views.setdefault(view.parameter, []).append(view)
        self._files = tensor_files(folder)
        tied = [name for name, _ in tied_names(model)]
        check_headers(views, tensor_shapes(self._files), str(folder), may_have=tied)

    def check(self, digests: Mapping[str, object], what: str) -> None:
        """ValueError names a parameter that is not the one that the adapters were trained on."""
        here = base_digests({name: rows_digest(self._read(name), 0) for name in self._views})
        check_base(digests, here, what, str(self._folder))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors of a checkpoint, to the bit those that engines had."""
        for name, views in self._views.items():
            whole, module = self._read(name), name.removesuffix(".weight")
            if f"{module}.{A}" in self._adapters:
                a, b = self._adapters[f"{module}.{A}"], self._adapters[f"{module}.{B}"]
                whole = merged(whole, scaled_product(a, b, self._scale))
            for view in views:
                yield view.name, view.of(whole)

    def _read(self, name: str) -> Tensor:
        whole = torch.empty(self._shapes[name], dtype=self._dtype)
        for view in self._views[name]:
            with open_tensors(self._files[view.name]) as file:
                view.of(whole).copy_(file.get_tensor(view.name))
        return whole


def save_peft_folder(
    target: Path, model_folder: Path, lora: LoraSpec, adapters: Mapping[str, Tensor], base: str
) -> None:
    """Write adapters as a folder that PEFT, and vLLM's `--enable-lora`, load beside the weights they belong to.

    Args:
        target: folder to write; must not have adapters yet.
        model_folder: with the model's config.json.
        lora: what the adapters are.
        adapters: them, whole, by parameter.
        base: name of the model that they belong to.

    Raises:
        UserError: `target` has adapters.
    """
    target.mkdir(parents=True, exist_ok=True)
    if (target / PEFT_WEIGHTS).exists():
        raise UserError(f"{target}: has adapters already; choose an empty folder")
    model = build_hf_model(model_folder)
    chosen = adapted_modules(linear_modules(model), lora, str(model_folder))
    tensors = {f"{_PEFT_MODEL}{name}.weight": tensor.contiguous() for name, tensor in adapters.items()}
    with writing(target / PEFT_WEIGHTS, sum(tensor.nbytes for tensor in tensors.values())):
        save_file(tensors, target / PEFT_WEIGHTS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": _targets(model, chosen),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    write_whole(target / PEFT_CONFIG, json.dumps(config, indent=2) + "\n", durable=False)


def _targets(model: nn.Module, chosen: Sequence[LinearModule]) -> list[str]:
    """Last parts of the chosen modules' names; whole names where a module that is not chosen ends like one, for PEFT
    would give it an adapter too: a tower's MLP may be called as the language model's."""
    names, short = {module.name for module in chosen}, {module.short for module in chosen}
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return sorted(names if any(name.rpartition(".")[2] in short and name not in names for name in linear) else short)
