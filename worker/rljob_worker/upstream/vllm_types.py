"""Protocols of vLLM's objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata

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
        """Kind of log-probabilities that a request gets."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations."""
        ...


class LoadedWeights(Protocol):
    """An attention layer, `Attention` or `MLAAttention`, or what computes it."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Derive what depends on the weights."""
        ...


class AttentionLayer(LoadedWeights, Protocol):
    """`Attention`, or `MLAAttention`."""

    @property
    def impl(self) -> LoadedWeights:
        """Implementation that computes it."""
        ...


class Sampler(Protocol):
    """Chooses tokens."""

    @property
    def topk_topp_sampler(self) -> object:
        """Its part that truncates."""
        ...

    def __call__(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> SamplerOutput:
        """A token for each row of the logits."""
        ...


class SampledRequest(Protocol):
    """A request in a worker."""

    @property
    def sampling_params(self) -> Any:
        """vLLM's `SamplingParams`."""
        ...


class InputBatch(Protocol):
    """The requests of a step, by row."""

    @property
    def num_reqs(self) -> int:
        """Rows that are used."""
        ...

    @property
    def req_ids(self) -> Sequence[str]:
        """Name of each row's request."""
        ...

    @property
    def num_tokens_no_spec(self) -> npt.NDArray[np.int32]:
        """Tokens of each row's request by now, its prompt's included: the position of the next one."""
        ...


class AdaptedLayer(Protocol):
    """A module that adds what adapters compute (`BaseLinearLayerWithLoRA`)."""

    @property
    def lora_a_stacked(self) -> Sequence[torch.Tensor]:
        """[slots, 1, rank, in] of each part of a fused module."""
        ...

    @property
    def lora_b_stacked(self) -> Sequence[torch.Tensor]:
        """[slots, 1, out, rank] of each."""
        ...

    def set_lora(self, index: int, lora_a: object, lora_b: object) -> None:
        """Copy an adapter into a slot: a tensor each, or a list with one or None for each part of a fused module."""


class AdapterManager(Protocol):
    """The adapters of a model (`LoRAModelManager`)."""

    @property
    def modules(self) -> Mapping[str, AdaptedLayer]:
        """By name."""
        ...

    @property
    def packed_modules(self) -> Mapping[str, Sequence[str]]:
        """Fused module -> names of its parts."""
        ...

    @property
    def lora_index_to_id(self) -> Sequence[int | None]:
        """The adapter in each slot."""
        ...


class WorkerAdapters(Protocol):
    """A worker's adapters (`WorkerLoRAManager`)."""

    @property
    def _adapter_manager(self) -> AdapterManager: ...


class ModelRunner(Protocol):
    """Holder of a worker's model."""

    @property
    def model(self) -> Model:
        """Model of this worker: a shard of the whole at tensor parallel sizes above 1."""
        ...

    @property
    def model_config(self) -> ModelConfig:
        """The engine's."""
        ...

    @property
    def sampler(self) -> Sampler:
        """After the model."""
        ...

    @property
    def input_batch(self) -> InputBatch:
        """Batch of the running step."""
        ...

    @property
    def lora_manager(self) -> WorkerAdapters:
        """Only where the engine was started with adapters."""
        ...

    @property
    def requests(self) -> Mapping[str, SampledRequest]:
        """By name."""
        ...
