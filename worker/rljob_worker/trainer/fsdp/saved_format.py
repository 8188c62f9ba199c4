"""Parts of Hugging Face tensors in the states of FSDP's ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rljob_api.spec import LoraSpec
from rljob_worker.models.adapters import adapter_views, add_adapters
from rljob_worker.models.checkpoint_views import CheckpointView, checkpoint_views
from rljob_worker.models.hf_model import build_hf_model
from rljob_worker.models.value_model import build_value_model
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.tensor_slice import Piece
from rljob_worker.trainer.fsdp.pieces import pieces_of_rows

if TYPE_CHECKING:
    from rljob_worker.models.hf_model import HfModel


def saved_format(model_folder: Path, lora: LoraSpec | None) -> FsdpFormat:
    """The format for the model of a folder, and for its adapters where there are any."""
    model = build_hf_model(model_folder)
    views = checkpoint_views(model)
    if lora is not None:
        add_adapters(model, lora, torch.float32, str(model_folder))
        views = adapter_views(model)
    return FsdpFormat(model, views, lora)


def critic_format(model_folder: Path) -> FsdpFormat:
    """The format for the critic that begins with a folder."""
    built = build_value_model(model_folder)
    return FsdpFormat(built.model, built.views)


class FsdpFormat:
    """A `SavedFormat`: rows of transformers' parameters, and the optimizer's state of the same rows."""

    def __init__(self, model: HfModel, views: list[CheckpointView], lora: LoraSpec | None = None) -> None:
        self._views = views
        self._sizes = {name: parameter.shape[0] for name, parameter in model.named_parameters()}
        self.untrained: tuple[str, ...] = ()
        self.lora = lora
        self.manifest = [(view.name, view.shape) for view in self._views]

    def pieces_of(self, shard: Mapping[str, Tensor], layout: ParallelLayout) -> list[Piece]:
        """The Hugging Face tensors' parts in a rank's rows."""
        return pieces_of_rows(shard, self._views, self._sizes, layout)

    def may_be_primary(self, at: ParallelLayout) -> bool:
        """Whether it belongs to the first copy, which alone is saved."""
        return at.rank < at.shards

    def sharers(self, parameter: str, at: ParallelLayout) -> list[int]:
        """The rank itself: it updates its own rows."""
        return [at.rank]
