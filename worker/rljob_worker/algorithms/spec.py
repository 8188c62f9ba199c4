"""The registry of algorithms: adding one is one file that calls `register`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rljob_api.spec import AlgorithmSpec
from rljob_worker.algorithms.losses import LossInputs

AdvantageFunction = Callable[[Tensor, AlgorithmSpec], Tensor]
"""Rewards [P, G] float32 -> advantages [P, G] float32."""
LossFunction = Callable[[LossInputs, AlgorithmSpec], tuple[Tensor, dict[str, Tensor]]]
"""One micro-batch -> (its share of the loss, its summed metrics): see `losses.policy_gradient_loss`."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What the trainer and the driver need to know of a policy-gradient algorithm."""

    name: str
    """As in `spec.algorithm.name`."""
    advantages: AdvantageFunction
    """Run by the driver on the step's rewards."""
    policy_loss: LossFunction
    """Run by the trainer on each micro-batch."""
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


def get_algorithm(name: str) -> Algorithm:
    """The algorithm registered as `name`; ValueError lists the names there are."""
    if name not in _REGISTRY:
        raise ValueError(f"spec.algorithm.name: {name!r} is not built; available: {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name]
