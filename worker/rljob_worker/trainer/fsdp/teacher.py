"""A teacher beside FSDP's policy: another model over the same ranks, without gradients or an optimizer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from rljob_api.spec import RLJobSpec
from rljob_worker.models.facts import ModelFacts
from rljob_worker.trainer.fsdp.rank_state import Joined, build_frozen_model
from rljob_worker.trainer.fsdp.updates import Passes
from rljob_worker.trainer.parked import ParkedWeights
from rljob_worker.trainer.stopping import StopAgreement


class FsdpTeacher:
    """A `TeacherBackend`: one rank's rows of the teacher, in the format of computation.

    Args:
        joined: the rank among the others.
        spec: the job.
        folder: Hugging Face folder with its weights.
        agreement: on stops; one for all models of a rank.
    """

    segment_cost: float | None = None

    def __init__(self, joined: Joined, spec: RLJobSpec, folder: Path, agreement: StopAgreement) -> None:
        self.vocab_size = ModelFacts.from_hf(folder).vocab_size
        model, shards = build_frozen_model(joined, spec, folder)
        self.forward = Passes(model, joined.layout, agreement, joined.device.torch_device).without_gradients
        self._weights = ParkedWeights(shards.rows.values())

    def present(self) -> AbstractContextManager[None]:
        """Inside, the weights are on the device."""
        return self._weights
