"""Losses and metrics from the log-probabilities of one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rljob_api import derived
from rljob_api.spec import Divergence, RLJobSpec
from rljob_worker.algorithms import (
    MAX_METRICS,
    LossInputs,
    finish_metrics,
    get_algorithm,
    policy_gradient_loss,
    token_weights,
)
from rljob_worker.algorithms.mismatch import mismatch_by_age
from rljob_worker.algorithms.output_layer import Wanted
from rljob_worker.trainer.batches import MicroBatch, Update
from rljob_worker.types import FloatArray, IntArray, SamplingParams, TokenLogProbs


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Results of the output layer for a micro-batch's n response tokens; equal on all ranks that share its columns."""

    log_probs: Tensor
    """[n] float32."""
    entropy: Tensor
    """[n] float32; zeros where it was not wanted."""
    state_values: Tensor | None = None
    """[n] float32, V of the tokens before each, of a critic, which has nothing else; None: of a policy."""
    divergence: Tensor | None = None
    """[n] float32, from the teacher's likeliest tokens, differentiable; None: there are none."""
    table: Tensor | None = None
    """[n, c] float32, a teacher's `TeacherRows`; None: of a policy."""

    @classmethod
    def of_table(cls, table: Tensor, wanted: Wanted) -> TokenValues:
        """Unpack [n, c] of `output_layer.token_table`."""
        if wanted.top:
            return cls(table[:, 0], table.new_zeros(0), table=table)
        log_probs, entropy, *further = table.unbind(-1)
        return cls(log_probs, entropy, divergence=further[0] if further else None)

    @classmethod
    def of_critic(cls, table: Tensor) -> TokenValues:
        """Unpack [n, 1] of a critic's head."""
        nothing = table.new_zeros(0)
        return cls(nothing, nothing, table.squeeze(1).float())


class Loss(Protocol):
    """The loss of an optimizer update, micro-batch by micro-batch."""

    wanted: Wanted | None
    """Asked of the output layer; None: a critic's values."""
    names: list[str]
    """The metrics that a call returns, in order; empty until the first micro-batch. One of them is `loss`."""

    def __call__(self, index: int, micro_batch: MicroBatch, tokens: TokenValues, /) -> tuple[Tensor, Tensor]:
        """(a micro-batch's share of the loss, its metrics [M] float32)."""
        ...


class LogProbs:
    """Collects the log-probabilities of response tokens: [n] float32 of each micro-batch."""

    def __init__(self, sampling: SamplingParams, vocab_size: int) -> None:
        self.wanted: Wanted | None = Wanted(sampling, vocab_size, entropy=False)

    def __call__(self, _index: int, _micro_batch: MicroBatch, tokens: TokenValues) -> tuple[Tensor, Tensor]:
        """(a loss that nobody uses, the log-probabilities)."""
        return tokens.log_probs.sum(), tokens.log_probs


class TeacherTables:
    """Collects what a teacher says of response tokens: [n, c] float32 of each micro-batch, for `MicroBatch.teacher`.

    Args:
        sampling: how they were sampled.
        vocab_size: tokens that policy and teacher have in common.
        top: how many of its likeliest tokens; 0: the log-probabilities of the sampled ones alone, c = 1.
    """

    def __init__(self, sampling: SamplingParams, vocab_size: int, top: int) -> None:
        self.wanted: Wanted | None = Wanted(sampling, vocab_size, entropy=False, top=top)

    def __call__(self, _index: int, _micro_batch: MicroBatch, tokens: TokenValues) -> tuple[Tensor, Tensor]:
        """(a loss that nobody uses, the table)."""
        table = tokens.log_probs.unsqueeze(-1) if tokens.table is None else tokens.table
        return tokens.log_probs.sum(), table


class PolicyLoss:
    """The algorithm's loss over the micro-batches of one optimizer update.

    With partial rollout the mismatch of trainer and engine is measured for each age of a token: `version` is that of
    the weights that the step starts from.

    Attributes:
        wanted: of the output layer.
        names: of the metrics that `__call__` returns, in order; empty until the first micro-batch.
        before: of the micro-batches with samples below `reported`, their samples [b], the tokens of each [b], and the
            log-probabilities of these before the step's updates.
    """

    def __init__(
        self,
        spec: RLJobSpec,
        update: Update,
        sampling: SamplingParams,
        vocab_size: int,
        old_log_probs: list[Tensor] | None,
        reference_log_probs: list[Tensor] | None,
        version: int,
        reported: int = 0,
    ) -> None:
        self._spec = spec.algorithm.model_copy(update={"anchor": derived.ratio_anchor(spec)})
        self._token_loss = get_algorithm(spec.algorithm.name).token_loss
        distill = self._spec.distill
        self.wanted: Wanted | None = Wanted(
            sampling,
            vocab_size,
            entropy_grad=self._spec.entropy_coefficient > 0,
            divergence=distill is not None and distill.divergence is Divergence.TOP_K,
        )
        self._old = old_log_probs
        self._reference = reference_log_probs
        self._denominators = {
            "num_tokens": update.num_tokens,
            "num_sequences": update.num_sequences,
            "constant_length": derived.longest_sampled(spec),
        }
        self._version = version
        self._num_ages = derived.max_staleness(spec) + 1 if derived.mixes_versions(spec) else 0
        self._reported = reported
        self.before: list[tuple[IntArray, Tensor, Tensor]] = []
        self.names: list[str] = []

    def __call__(self, index: int, micro_batch: MicroBatch, tokens: TokenValues) -> tuple[Tensor, Tensor]:
        """(this micro-batch's share of the loss, its metrics [M] float32 in the order of `names`)."""
        log_probs, entropy = tokens.log_probs, tokens.entropy
        weights = token_weights(micro_batch.mask, self._spec.aggregation, **self._denominators)
        loss, metrics = policy_gradient_loss(
            LossInputs(
                log_probs=log_probs,
                advantages=micro_batch.advantages,
                mask=torch.ones_like(micro_batch.labels, dtype=torch.bool),
                weights=weights[micro_batch.mask],
                old_log_probs=None if self._old is None else self._old[index],
                rollout_log_probs=micro_batch.rollout_log_probs,
                reference_log_probs=None if self._reference is None else self._reference[index],
                teacher_log_probs=None if micro_batch.teacher is None else micro_batch.teacher[:, 0],
                divergence=tokens.divergence,
                entropy=entropy,
                sequences=micro_batch.sequences,
            ),
            self._spec,
            self._token_loss,
        )
        old = log_probs.detach() if self._old is None else self._old[index]
        if (micro_batch.samples < self._reported).any():
            self.before.append((micro_batch.samples, micro_batch.mask.sum(1), old))
        if self._num_ages:
            ages = self._version - micro_batch.versions
            metrics |= mismatch_by_age(old, micro_batch.rollout_log_probs, ages, self._num_ages)
        self.names = list(metrics)
        return loss, torch.stack(list(metrics.values()))


def reported_log_probs(losses: Sequence[PolicyLoss], reported: int) -> TokenLogProbs | None:
    """Log-probabilities before a step's updates, of this rank's samples below `reported`; None where it has none."""
    samples: list[int] = []
    counts: list[int] = []
    values: list[FloatArray] = []
    for numbers, tokens, old in (each for loss in losses for each in loss.before):
        sizes = tokens.cpu().numpy()
        parts = np.split(old.float().cpu().numpy(), np.cumsum(sizes)[:-1])
        for number, size, part in zip(numbers.tolist(), sizes.tolist(), parts, strict=True):
            if number < reported:
                samples.append(number)
                counts.append(size)
                values.append(part)
    if not samples:
        return None
    return TokenLogProbs(np.array(samples), np.array(counts), np.concatenate(values).astype(np.float32))


class MetricReduction:
    """Adds up metrics over micro-batches and ranks."""

    def __init__(self, contributes: bool, world_size: int) -> None:
        self._contributes = contributes
        self._world_size = world_size
        self._names: list[str] = []

    def reduce(self, names: list[str], rows: list[Tensor]) -> dict[str, float]:
        """Reduced metrics, the same on all ranks; collective.

        Args:
            names: metric names; only used on ranks that contribute.
            rows: [M] float32 of each micro-batch.
        """
        if not self._names:
            self._names = self._agree(names)
        maxima = torch.tensor([name in MAX_METRICS for name in self._names])
        total = torch.zeros(len(self._names), dtype=torch.float64)
        largest = total.clone()
        if self._contributes:
            # On the host: not every device adds doubles, and gloo reduces what lies here.
            table = torch.stack(rows).cpu().double()
            total, largest = table.sum(0), table.amax(0)
        if self._world_size > 1:
            total, largest = self._over_ranks(torch.stack([total, largest]))
        return dict(zip(self._names, torch.where(maxima, largest, total).tolist(), strict=True))

    def summed(self, own: Tensor) -> Tensor:
        """Sum of [M] float64 over all ranks, each of which contributes; the same on all; collective."""
        return self._over_ranks(torch.stack([own, own]))[0] if self._world_size > 1 else own

    def _over_ranks(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Sums and maxima over the ranks, [M] each, of their rows [2, M]: equal on all ranks.

        Gathered, and added up here: MindSpeed (core_r0.16.0) puts a function in the place of `all_reduce` that reduces
        a float32 copy of a float64 tensor and throws it away. Each rank would report its own share, and where one of
        them has a NaN the ranks would not decide alike.
        """
        everyone = [torch.empty_like(own) for _ in range(self._world_size)]
        dist.all_gather(everyone, own)
        table = torch.stack(everyone)
        return table[:, 0].sum(0), table[:, 1].amax(0)

    def _agree(self, names: list[str]) -> list[str]:
        if self._world_size == 1:
            return names
        everyone: list[list[str]] = [[] for _ in range(self._world_size)]
        dist.all_gather_object(everyone, names)
        return next(given for given in everyone if given)


def mean_over_updates(reduced: list[dict[str, float]]) -> dict[str, float]:
    """Reported metrics of a step: the mean over those of its updates that have it, maxima excepted."""
    by_name: dict[str, list[float]] = {}
    for metrics in reduced:
        for name, value in finish_metrics(metrics).items():
            by_name.setdefault(name, []).append(value)
    return {
        name: max(values) if name.removeprefix("train/") in MAX_METRICS else sum(values) / len(values)
        for name, values in by_name.items()
    }
