"""The critic on a trainer's rank: values, advantages made of them, and its updates.

Values of a step are added up over the ranks, so that each has those of all tokens: advantages and returns are then the
same everywhere, whichever rank computes which sample, and the updates of critic and policy may be cut differently.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rljob_api import derived
from rljob_api.json_types import Json
from rljob_api.spec import CriticSpec, GaeSpec, RLJobSpec
from rljob_worker.algorithms import token_weights
from rljob_worker.algorithms.gae import Estimates, explained_variance, generalized_advantages, outcome_rewards
from rljob_worker.algorithms.output_layer import Wanted
from rljob_worker.algorithms.shaping import shape_advantages
from rljob_worker.algorithms.value_loss import clipped_value_loss
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.trainer.backend import CriticBackend
from rljob_worker.trainer.batches import MicroBatch, PackedBatch, Update, plan_step
from rljob_worker.trainer.checked_file import CheckedFile
from rljob_worker.trainer.dealing import Dealing
from rljob_worker.trainer.objective import TokenValues
from rljob_worker.trainer.step_updates import Applied, StepUpdates
from rljob_worker.types import FloatArray, IntArray, StepMetrics, TrainBatch


class StateValues:
    """Collects V(s_t), the value at the position that predicts a response token: [n] float32 of each micro-batch."""

    wanted: Wanted | None = None

    def __call__(self, _index: int, _micro_batch: MicroBatch, tokens: TokenValues, /) -> tuple[Tensor, Tensor]:
        """(a loss that nobody uses, the values)."""
        values = _values_of(tokens)
        return values.sum(), values


def _values_of(tokens: TokenValues) -> Tensor:
    if tokens.state_values is None:
        raise RuntimeError("a policy's model was asked for values")
    return tokens.state_values


class ValueLoss:
    """The clipped value loss over the micro-batches of one update of the critic; a `Loss`.

    Args:
        spec: the job: how token losses become one number.
        clip: distance from the old values.
        update: the update.
        old_values: [n] float32, from before the step's first update, of each micro-batch.
        returns: the same.
        constant_length: longest response that is allowed.
    """

    wanted: Wanted | None = None

    def __init__(
        self,
        spec: RLJobSpec,
        clip: float,
        update: Update,
        old_values: list[Tensor],
        returns: list[Tensor],
        constant_length: int,
    ) -> None:
        self._aggregation, self._clip = spec.algorithm.aggregation, clip
        self._old, self._returns = old_values, returns
        self._denominators = {
            "num_tokens": update.num_tokens,
            "num_sequences": update.num_sequences,
            "constant_length": constant_length,
        }
        self.names = ["loss", "tokens", "clipped"]

    def __call__(self, index: int, micro_batch: MicroBatch, tokens: TokenValues, /) -> tuple[Tensor, Tensor]:
        """(this micro-batch's share of the loss, its metrics [3] float32)."""
        values = _values_of(tokens)
        old, returns = (given[index].to(values.device) for given in (self._old, self._returns))
        losses, clipped = clipped_value_loss(values, old, returns, self._clip)
        weights = token_weights(micro_batch.mask, self._aggregation, **self._denominators)
        loss = (losses * weights[micro_batch.mask]).sum()
        counts = (torch.tensor(float(len(values)), device=values.device), clipped.sum().float())
        return loss, torch.stack([loss.detach(), *counts])


@dataclass(frozen=True, slots=True)
class _Step:
    """A step once its values are computed."""

    batch: TrainBatch
    updates: list[Update]
    tokens: list[list[IntArray]]
    """Numbers, among all sampled tokens, of those of each micro-batch of each update."""
    values: Tensor
    """[n] float32."""
    estimates: Estimates
    advantages: FloatArray
    """[n], whitened and bounded as the job says."""


class Critic:
    """One rank of the critic, all of whose calls are collective.

    An update of it is undone with the step that it belongs to: until `settle`, `updates.undo` goes back to before it.

    Args:
        backend: its model.
        spec: the job.
        critic: its settings.
        layout: of the rank.
        total_updates: optimizer updates of it in the whole job.
        constant_length: longest response that is allowed.

    Attributes:
        updates: of its model.
    """

    def __init__(
        self,
        backend: CriticBackend,
        spec: RLJobSpec,
        critic: CriticSpec,
        layout: ParallelLayout,
        total_updates: int,
        constant_length: int,
    ) -> None:
        self._backend, self._spec, self._critic, self._layout = backend, spec, critic, layout
        self._constant_length = constant_length
        self.updates = StepUpdates(backend, derived.critic_optimizer(spec, critic), total_updates)
        self._step: _Step | None = None

    def compute_values(self, batch: TrainBatch) -> None:
        """Compute the values of a step's tokens, and advantages and returns of them; kept here.

        Raises:
            StopRequested: on all ranks.
            ValueError: a batch without rewards, or one that cannot be cut into the critic's updates.
        """
        self._step = None
        packed = PackedBatch(batch)
        if batch.rewards is None:
            raise ValueError("values: the batch has no rewards, which advantages are made of")
        count = self._critic.updates_per_step
        if len(packed) % count:
            raise ValueError(f"critic.updatesPerStep: {count} does not divide the step's {len(packed)} samples")
        dealing = Dealing(
            self._spec.training.max_tokens_per_micro_batch, self._layout.samples, pair_cost=self._backend.pair_cost
        )
        updates = plan_step(packed, len(packed) // count, dealing, self._layout.samples_rank)
        tokens = [[packed.sampled_of(one.samples) for one in update.micro_batches] for update in updates]
        found = self._backend.forward([one for update in updates for one in update.micro_batches], StateValues())
        values = torch.zeros(len(batch.advantages))
        if self._layout.answers:
            for places, part in zip((places for update in tokens for places in update), found, strict=True):
                values[torch.from_numpy(places)] = part.cpu()
        if self._layout.world_size > 1:
            # Each token is on one rank of those that answer: the sum is exact.
            dist.all_reduce(values)
        lengths = torch.from_numpy(packed.responses)
        gae = self._spec.algorithm.gae or GaeSpec()
        rewards = outcome_rewards(torch.from_numpy(batch.rewards), lengths)
        estimates = generalized_advantages(rewards, values, lengths, gamma=gae.gamma, lam=gae.lam)
        each = torch.ones(len(values), dtype=torch.int64)
        advantages = shape_advantages(estimates.advantages, each, self._spec.algorithm).numpy()
        self._step = _Step(batch, updates, tokens, values, estimates, advantages)

    def advantages_of(self, batch: TrainBatch) -> FloatArray:
        """Advantages [n] of a step's tokens; RuntimeError where its values were not computed."""
        return self._known(batch).advantages

    def train(self, batch: TrainBatch) -> StepMetrics:
        """All updates of the critic in a step whose values were computed; to be settled or undone.

        Returns:
            Metrics, the same on all ranks. After a value that is not finite, `applied` is False, and the critic is as
            before the step.

        Raises:
            StopRequested: on all ranks; the critic is as before the step.
        """
        step = self._known(batch)
        self.updates.undo()
        losses = []
        for update, tokens in zip(step.updates, step.tokens, strict=True):
            old, returns = (
                [of_all[torch.from_numpy(places)] for places in tokens]
                for of_all in (step.values, step.estimates.returns)
            )
            losses.append(ValueLoss(self._spec, self._critic.value_clip, update, old, returns, self._constant_length))
        return _report(step, self.updates.run(step.updates, losses, undoable=True))

    def settle(self) -> None:
        """The step is done: its updates stay."""
        self.updates.settle()
        self._step = None

    def save(self, folder: str) -> CheckedFile:
        """Write this rank's file of the critic; works asleep and awake."""
        return self._backend.save(folder, updates=self.updates.done)

    def load(self, folder: str) -> None:
        """Continue from a saved state; ValueError where it is another model's, missing or damaged."""
        self.updates.done = self._backend.load(folder).updates

    def _known(self, batch: TrainBatch) -> _Step:
        if self._step is None or self._step.batch is not batch:
            raise RuntimeError("train: a job with a critic needs values() of the same batch first")
        return self._step


def _report(step: _Step, applied: Applied) -> StepMetrics:
    results, fault = applied.results, applied.fault
    returns, values = step.estimates.returns, step.values
    tokens = sum(result.metrics["tokens"] for result in results)
    metrics = {
        "critic/value_loss": float(np.mean([result.metrics["loss"] for result in results])),
        "critic/value_clip_fraction": sum(result.metrics["clipped"] for result in results) / max(tokens, 1.0),
        "critic/grad_norm": float(np.mean([result.grad_norm for result in results])),
        "critic/lr": applied.rate,
        "critic/explained_variance": explained_variance(values, returns),
        "critic/value_mean": float(values.double().mean()),
        "critic/return_mean": float(returns.double().mean()),
    }
    detail: dict[str, Json] = {"critic_updates": len(results)}
    if fault is not None:
        detail["reason"] = f"update {len(results)} of {len(step.updates)} of the critic: {fault}"
    return StepMetrics(metrics, fault is None, detail)
