"""Forward passes of one trainer rank: log-probabilities under the policy, the starting weights and the teacher."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rljob_api.spec import Divergence, RLJobSpec
from rljob_worker.trainer.backend import TrainerBackend
from rljob_worker.trainer.batches import MicroBatch, PackedBatch, Update
from rljob_worker.trainer.dealing import plan_update
from rljob_worker.trainer.objective import LogProbs, TeacherTables
from rljob_worker.trainer.planned_step import dealing_of
from rljob_worker.types import BatchPictures, FloatArray, IntArray, SamplingParams, TrainBatch


class ForwardPasses:
    """Passes that change no weight; collective.

    Args:
        backend: has the models.
        spec: the job.

    Attributes:
        vocab_size: columns of the logits that are tokens; where there is a teacher, those that it has too.
    """

    def __init__(self, backend: TrainerBackend, spec: RLJobSpec) -> None:
        self._backend, self._spec = backend, spec
        self.vocab_size = backend.vocab_size
        if backend.teacher is not None:
            # Of a family's models the larger vocabulary ends in padding, which has no token.
            self.vocab_size = min(self.vocab_size, backend.teacher.vocab_size)

    def log_probs(self, updates: Sequence[Update], sampling: SamplingParams) -> list[list[Tensor]]:
        """Log-probabilities of the response tokens [n] under the policy, by update and micro-batch."""
        flat = [micro_batch for update in updates for micro_batch in update.micro_batches]
        return _by_update(updates, self._log_probs(flat, sampling))

    def reference_log_probs(self, updates: Sequence[Update], sampling: SamplingParams) -> list[list[Tensor]]:
        """The same under the starting weights."""
        with torch.no_grad(), self._backend.reference():
            return _by_update(updates, self._log_probs(_with_own_routing(updates), sampling))

    def teacher_tables(self, updates: Sequence[Update], sampling: SamplingParams) -> list[Tensor]:
        """The teacher's tables [n, c] of the micro-batches of all updates; none on stages before the last."""
        teacher, distill = self._backend.teacher, self._spec.algorithm.distill
        assert teacher is not None
        assert distill is not None
        top = distill.top_k if distill.divergence is Divergence.TOP_K else 0
        with torch.no_grad(), teacher.present():
            return teacher.forward(_with_own_routing(updates), TeacherTables(sampling, self.vocab_size, top))

    def score(
        self, token_lists: Sequence[IntArray], sampling: SamplingParams, pictures: BatchPictures | None
    ) -> list[FloatArray]:
        """Log-probability of each token but the first, given those before it.

        Args:
            token_lists: N sequences [length] int64.
            sampling: transform of the logits.
            pictures: of all sequences; None: there are none.

        Returns:
            N arrays [length - 1] float32, the same on all ranks.
        """
        count = len(token_lists)
        packed = PackedBatch(
            TrainBatch.of_responses(
                token_lists,
                np.ones(count, dtype=np.int64),
                [np.zeros(len(tokens) - 1, dtype=np.float32) for tokens in token_lists],
                np.zeros(count, dtype=np.float32),
                pictures=pictures,
            )
        )
        groups = plan_update(packed.inputs, dealing_of(self._backend, self._spec, parts=1), 0)
        rows = self._log_probs([packed.micro_batch(group) for group in groups], sampling)
        values = torch.cat(rows).cpu() if rows else torch.zeros(int(packed.responses.sum()))
        self._backend.from_output_rank(values)
        order = np.concatenate(groups)
        parts = np.split(values.numpy(), np.cumsum(packed.responses[order])[:-1])
        by_sample = dict(zip(order.tolist(), parts, strict=True))
        return [by_sample[i].astype(np.float32, copy=True) for i in range(count)]

    def _log_probs(self, micro_batches: Sequence[MicroBatch], sampling: SamplingParams) -> list[Tensor]:
        return self._backend.forward(micro_batches, LogProbs(sampling, self.vocab_size))


def _with_own_routing(updates: Sequence[Update]) -> list[MicroBatch]:
    """Micro-batches for a model whose routers choose for themselves: they are not those of the engine."""
    return [one.with_own_routing() for update in updates for one in update.micro_batches]


def _by_update(updates: Sequence[Update], found: Sequence[Tensor]) -> list[list[Tensor]]:
    rows = iter(found)
    return [[row for _, row in zip(update.micro_batches, rows)] for update in updates]
