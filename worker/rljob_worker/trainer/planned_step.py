"""A step between the calls that make it: the plan of its batch, and what forward passes have found for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from rljob_api.json_types import Json
from rljob_api.spec import RLJobSpec
from rljob_worker.trainer.backend import TrainerBackend
from rljob_worker.trainer.batches import PackedBatch, Update, plan_step
from rljob_worker.trainer.dealing import Dealing
from rljob_worker.trainer.objective import PolicyLoss, mean_over_updates
from rljob_worker.trainer.step_updates import Applied
from rljob_worker.types import FloatArray, SamplingParams, StepMetrics, TrainBatch


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

    @classmethod
    def of(
        cls, batch: TrainBatch, backend: TrainerBackend, spec: RLJobSpec, advantages: FloatArray | None
    ) -> PlannedStep:
        """Plan this rank's share of a batch.

        Args:
            batch: all samples of the step.
            backend: computes the share.
            spec: the job.
            advantages: of all response tokens [n], in the place of the batch's; None: those.

        Raises:
            RuntimeError: the job's routers follow the engine's, and the batch has no experts.
        """
        if spec.rollout.router_replay and batch.experts is None:
            raise RuntimeError("train: rollout.routerReplay needs the engine's experts, and the batch has none")
        packed = PackedBatch(batch)
        if advantages is not None:
            packed.advantages = advantages
        layout = backend.layout
        dealing = dealing_of(backend, spec, layout.samples)
        return cls(batch, plan_step(packed, spec.training.global_batch_size, dealing, layout.samples_rank))

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


def dealing_of(backend: TrainerBackend, spec: RLJobSpec, parts: int) -> Dealing:
    """By what samples are dealt out to `parts` ranks of the policy."""
    layout, teacher = backend.layout, backend.teacher
    return Dealing(
        spec.training.max_tokens_per_micro_batch,
        parts,
        layout.pp,
        lockstep=layout.ep > 1,
        pair_cost=backend.pair_cost,
        segment_cost=backend.segment_cost if teacher is None or teacher.segment_cost is not None else None,
    )
