"""The model of a job, as its training backend sees it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rljob_api.spec import TrainingBackend, TrainingSpec
from rljob_worker.models.config import ModelConfig, check_context, check_model_sizes
from rljob_worker.models.manifest import HEAD, CheckpointTensors, embedding, hf_manifest
from rljob_worker.models.transformers_model import TransformersModel

TrainedModel = ModelConfig | TransformersModel


def trained_model(backend: TrainingBackend, source: str | Path | Mapping[str, object]) -> TrainedModel:
    """Read the config of a checkpoint folder, or a config given as a dict.

    Raises:
        UserError: no readable config, or a model or setting that the backend does not train; names it.
    """
    if backend is TrainingBackend.FSDP:
        return TransformersModel.from_hf(source)
    return ModelConfig.from_hf(source)


def check_trained_sizes(model: TrainedModel, training: TrainingSpec) -> None:
    """Refuse parallel sizes of a job that a model cannot be divided by; UserError says why."""
    if isinstance(model, ModelConfig):
        check_model_sizes(model, training)
    else:
        check_context(model, training.context_parallel, model.row_obstacle)


def checkpoint_tensors(model: TrainedModel) -> CheckpointTensors:
    """Tensors of a checkpoint of a model."""
    if isinstance(model, TransformersModel):
        return model.tensors
    tied = ((HEAD, embedding(model)),) if model.tied_embeddings else ()
    return CheckpointTensors(tuple(hf_manifest(model)), tied, model.untrained)
