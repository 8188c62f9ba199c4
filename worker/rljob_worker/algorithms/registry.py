"""The registry of algorithms: adding one is one file of this folder that calls `register`, then `make generate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from rljob_api.algorithms import AlgorithmFacts
from rljob_api.spec import AlgorithmSpec
from rljob_worker.algorithms.losses import TokenLoss
from rljob_worker.algorithms.shaping import shape_advantages, shape_rewards

AdvantageFunction = Callable[[Tensor, AlgorithmSpec], Tensor]
"""Rewards [P, G] float32 of groups of one size -> advantages [P, G] float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm(AlgorithmFacts):
    """A policy-gradient algorithm: its formulas beside what it asks of a job."""

    advantages: AdvantageFunction
    """Run by the driver on the step's rewards; with a critic, what is learned from in their place."""
    token_loss: TokenLoss
    """Run by the trainer on each micro-batch, inside `losses.policy_gradient_loss`."""
    old_log_probs_at_one_update: bool = False
    """Whether the loss needs old log-probabilities of their own even where they equal the training forward's."""

    def needs_old_log_probs(self, updates_per_step: int) -> bool:
        """Whether to compute them before training: with one update the training forward gives the same values."""
        return self.old_log_probs_at_one_update or updates_per_step > 1

    def needs_reference(self, spec: AlgorithmSpec) -> bool:
        """Whether the reference policy's log-probabilities are used."""
        return spec.kl.coefficient > 0 or spec.kl.monitor


_REGISTRY: dict[str, Algorithm] = {}


def register(algorithm: Algorithm) -> Algorithm:
    """Adds an algorithm; a name that is taken is a ValueError."""
    if algorithm.name in _REGISTRY:
        raise ValueError(f"algorithm {algorithm.name!r} is registered already")
    _REGISTRY[algorithm.name] = algorithm
    return algorithm


def registered() -> Mapping[str, Algorithm]:
    """Name -> algorithm, the default of `spec.algorithm.name` first."""
    default = AlgorithmSpec().name
    return MappingProxyType({name: _REGISTRY[name] for name in sorted(_REGISTRY, key=lambda n: (n != default, n))})


def step_advantages(
    algorithm: Algorithm, rewards: Tensor, sizes: Sequence[int], lengths: Tensor, spec: AlgorithmSpec
) -> Tensor:
    """A step's rewards, shaped, turned into advantages and shaped again.

    Args:
        algorithm: whose advantages.
        rewards: [N] float32, one group after the other.
        sizes: samples of each group; their sum is N.
        lengths: [N] int64, response tokens.
        spec: the job's settings.

    Returns:
        [N] float32; with a critic the shaped rewards, for the advantages of tokens are made where its values are.
    """
    # By numpy: torch would wake its threads for so little.
    of_sample = torch.from_numpy(np.repeat(sizes, sizes))
    advantages = torch.empty_like(rewards)
    for size in sorted(set(sizes)):
        alike = of_sample == size
        groups = shape_rewards(rewards[alike].view(-1, size), spec.rewards, rewards)
        advantages[alike] = algorithm.advantages(groups, spec).flatten()
    return advantages if algorithm.needs_critic else shape_advantages(advantages, lengths, spec)


def get_algorithm(name: str) -> Algorithm:
    """The algorithm registered as `name`; ValueError lists the names there are."""
    if name not in _REGISTRY:
        raise ValueError(f"spec.algorithm.name: {name!r} is not built; available: {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name]
