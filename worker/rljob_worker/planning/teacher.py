"""A teacher's part of a rank's memory: frozen weights that are on the device in its pass alone."""

from __future__ import annotations

from rljob_api import derived
from rljob_api.spec import Divergence, RLJobSpec
from rljob_worker.errors import UserError
from rljob_worker.models.places import TEACHER_PATH, folder_here
from rljob_worker.models.trained import TrainedModel, check_trained_sizes, trained_model
from rljob_worker.planning.job_shape import JobShape, MicroBatch

_FP32, _INT64 = 4, 8


def teacher_of(spec: RLJobSpec, model: TrainedModel) -> tuple[RLJobSpec, TrainedModel] | None:
    """The job and the model as the teacher's passes are planned by; None where there is no teacher.

    A checkpoint that is not here counts as one of the policy's size.

    Raises:
        UserError: one that the backend does not compute with, or not in this layout.
    """
    distill = spec.algorithm.distill
    if distill is None:
        return None
    training = spec.training.model_copy(update={"lora": None})
    own = folder_here(distill.teacher.path, TEACHER_PATH)
    if own is not None:
        try:
            model = trained_model(spec.training.backend, own)
            check_trained_sizes(model, training)
        except UserError as error:
            raise UserError(f"{TEACHER_PATH}: of {own}: {error}") from None
    return spec.model_copy(update={"training": training}), model


def _columns(spec: RLJobSpec) -> int:
    """Numbers that a teacher says of a token."""
    distill = spec.algorithm.distill
    if distill is None:
        return 0
    return 2 + 2 * distill.top_k if distill.divergence is Divergence.TOP_K else 1


def kept_bytes(spec: RLJobSpec, job: JobShape) -> int:
    """Host memory of a rank for what a teacher said of a step's tokens."""
    samples = -(-derived.samples_per_step(spec) // job.trainers.samples)
    return samples * derived.longest_sampled(spec) * _columns(spec) * _FP32


def taught_bytes(spec: RLJobSpec, batch: MicroBatch) -> int:
    """Device memory of a micro-batch's share of it in training: the table, ids, places and distances of its tokens."""
    distill = spec.algorithm.distill
    each = _columns(spec) * _FP32
    if distill is not None and distill.divergence is Divergence.TOP_K:
        each += distill.top_k * (2 * _INT64 + 3 * _FP32)
    return batch.responses * each
