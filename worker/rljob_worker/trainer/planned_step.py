"""A step between the calls that make it: the plan of its batch, and what forward passes have found for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from rljob_api.json_types import Json
from rljob_api.spec import RLJobSpec
from rljob_worker.trainer.batches import Update
from rljob_worker.trainer.objective import PolicyLoss, mean_over_updates
from rljob_worker.trainer.step_updates import Applied
from rljob_worker.types import SamplingParams, StepMetrics, TrainBatch


@dataclass(slots=True, eq=False)
class PlannedStep:
    """One batch of `ref_log_probs`, `teacher_log_probs`, `log_probs` and `train`; log-probabilities by update and
    micro-batch, of the response tokens [n]."""

    batch: TrainBatch
    updates: list[Update]
    old_log_probs: list[list[Tensor]] | None = None
    """Before the updates; None where no call has found them."""
    reference_log_probs: list[list[Tensor]] | None = None
    """Under the starting weights."""
    taught: bool = False
    """Whether micro-batches have the teacher's tables."""

    def teach(self, found: Sequence[Tensor]) -> None:
        """Give micro-batches the teacher's tables [n, c], on the host. Stages before the last have none."""
        tables = iter([table.cpu() for table in found])
        self.updates = [
            replace(each, micro_batches=[replace(one, teacher=next(tables, None)) for one in each.micro_batches])
            for each in self.updates
        ]
        self.taught = True

    def losses(
        self, spec: RLJobSpec, sampling: SamplingParams, vocab_size: int, version: int, reported: int
    ) -> list[PolicyLoss]:
        """Loss of each update of the step that leads to weights `version`."""
        return [
            PolicyLoss(
                spec,
                update,
                sampling,
                vocab_size,
                old_log_probs=None if self.old_log_probs is None else self.old_log_probs[index],
                reference_log_probs=None if self.reference_log_probs is None else self.reference_log_probs[index],
                version=version - 1,
                reported=reported,
            )
            for index, update in enumerate(self.updates)
        ]

    def report(self, applied: Applied, version: int, ranks: int) -> StepMetrics:
        """Metrics of the updates that were run.

        Args:
            applied: these; the last one may have failed.
            version: weight version that the step leads to.
            ranks: that have samples of their own.
        """
        results, fault = applied.results, applied.fault
        metrics = mean_over_updates([result.metrics for result in results])
        metrics["train/grad_norm"] = sum(result.grad_norm for result in results) / len(results)
        metrics["train/lr"] = applied.rate
        detail: dict[str, Json] = {
            "version": version,
            "updates": len(self.updates),
            "micro_batches": sum(len(update.micro_batches) for update in self.updates),
            "response_tokens": sum(update.num_tokens for update in self.updates),
        }
        if fault is not None:
            detail["reason"] = f"update {len(results)} of {len(self.updates)}: {fault}"
        imbalance = None
        if ranks > 1:
            imbalance = sum(update.imbalance for update in self.updates) / len(self.updates)
        return StepMetrics(metrics, fault is None, detail, imbalance=imbalance)
