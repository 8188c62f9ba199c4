"""What is used of vLLM's objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:

    class Model(torch.nn.Module):
        """A model of vLLM's; its classes have no base of their own."""

        _do_torchao_reload: object
        _original_do_torchao_reload: object

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
            """Load what is named as in a checkpoint."""


class ModelConfig(Protocol):
    """vLLM's configuration of a model."""

    @property
    def logprobs_mode(self) -> str:
        """Which log-probabilities a request gets."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        ...


class Sampler(Protocol):
    """What chooses tokens."""

    @property
    def topk_topp_sampler(self) -> object:
        """Its part that truncates."""
        ...


class ModelRunner(Protocol):
    """What has a worker's model."""

    @property
    def model(self) -> Model:
        """Of this worker: a shard of the whole at tensor parallel sizes above 1."""
        ...

    @property
    def model_config(self) -> ModelConfig:
        """As the engine's."""
        ...

    @property
    def sampler(self) -> Sampler:
        """After the model."""
        ...
