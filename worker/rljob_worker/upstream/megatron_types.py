"""Protocols of Megatron's objects; megatron-core comes without types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:

    class Parameter(torch.nn.Parameter):
        """One of a model that is wrapped."""

        main_grad: Tensor
        """View of a gradient buffer."""

    class OutputLayer(torch.nn.Module):
        """Megatron's ColumnParallelLinear over the vocabulary."""

        sequence_parallel: bool
        """Whether it gathers its input over the tensor-parallel ranks."""
        allreduce_dgrad: bool
        """Whether it adds up its input's gradient over them."""

    class GptModel(torch.nn.Module):
        """Megatron's GPTModel."""

        config: TransformerConfig
        decoder: Decoder
        rotary_pos_emb: RotaryEmbedding
        output_layer: OutputLayer
        """On the last pipeline stage."""

        def named_parameters(
            self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
        ) -> Iterator[tuple[str, Parameter]]:
            """By Megatron's names."""
            ...


class TransformerConfig(Protocol):
    """Megatron's configuration of a model."""

    hidden_size: int
    params_dtype: torch.dtype
    pipeline_model_parallel_size: int
    sequence_parallel: bool
    calculate_per_token_loss: bool
    variable_seq_lengths: bool
    finalize_model_grads_func: Callable[..., None]


class RotaryEmbedding(Protocol):
    """Positions' angles."""

    inv_freq: Tensor

    def get_rotary_seq_len(self, *args: object, **kwargs: object) -> int:
        """Number of positions whose angles are needed."""
        ...

    def __call__(self, length: int, **kwargs: object) -> Tensor:
        """[length, 1, 1, D], of the first positions."""
        ...


class Decoder(Protocol):
    """A pipeline stage's layers."""

    @property
    def input_tensor(self) -> Tensor:
        """Activations of the stage before."""
        ...


class Bucket(Protocol):
    """A part of a buffer."""

    @property
    def offset(self) -> int:
        """Elements from the buffer's first one."""
        ...

    param_data: Tensor
    grad_data: Tensor


class Buffer(Protocol):
    """Flat parameters and gradients of one kind."""

    param_data: Tensor
    grad_data: Tensor

    @property
    def numel(self) -> int:
        """Elements."""
        ...

    @property
    def param_dtype(self) -> torch.dtype:
        """Type of the parameters."""
        ...

    @property
    def grad_dtype(self) -> torch.dtype:
        """Type of the gradients."""
        ...

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Parts that are reduced at a time."""
        ...

    @property
    def param_index_map(self) -> Mapping[Parameter, tuple[int, int, int]]:
        """Parameter -> its first element, the one after its last, its bucket."""
        ...


class DistributedDataParallel(Protocol):
    """Megatron's wrapper of a model with flat buffers."""

    @property
    def module(self) -> GptModel:
        """The bare model."""
        ...

    @property
    def buffers(self) -> list[Buffer]:
        """Buffers of all parameters but the experts'."""
        ...

    @property
    def expert_parallel_buffers(self) -> list[Buffer]:
        """The experts'."""
        ...

    def parameters(self) -> Iterator[Parameter]:
        """The model's."""
        ...

    def zero_grad_buffer(self) -> None:
        """Before a pass."""
        ...

    def start_param_sync(self) -> None:
        """Gather what each rank has updated; collective."""
        ...

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None, *, packed_seq_params: object
    ) -> Tensor:
        """Output of this pipeline stage."""
        ...


class OptimizerConfig(Protocol):
    """Megatron's configuration of an optimizer."""

    @property
    def clip_grad(self) -> float:
        """Largest norm; 0 for any."""
        ...


class Range(Protocol):
    """Elements of something flat."""

    @property
    def start(self) -> int:
        """The first."""
        ...


class DistributedOptimizer(Protocol):
    """One of the chained ones: for dense parameters or for experts."""

    @property
    def is_stub_optimizer(self) -> bool:
        """Whether this rank has nothing to update."""
        ...

    @property
    def config(self) -> OptimizerConfig:
        """The job's."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """torch's."""
        ...

    @property
    def model_fp32_groups(self) -> Sequence[Sequence[Parameter]]:
        """Parameters that are updated in their own memory."""
        ...

    @property
    def shard_fp32_groups(self) -> Sequence[Sequence[Tensor]]:
        """This rank's views of them."""
        ...

    @property
    def model_float16_groups(self) -> Sequence[Sequence[Parameter]]:
        """Parameters with fp32 masters."""
        ...

    @property
    def shard_fp32_from_float16_groups(self) -> Sequence[Sequence[Tensor]]:
        """This rank's masters."""
        ...

    def get_parameters(self) -> list[Tensor]:
        """Tensors that torch's optimizer updates."""
        ...

    def _get_model_param_range_map(self, param: Parameter) -> Mapping[str, Range]:
        """`param`: the elements of the flat parameter that this rank updates."""
        ...


class ChainedOptimizer(Protocol):
    """Optimizer of a rank."""

    @property
    def chained_optimizers(self) -> Sequence[DistributedOptimizer]:
        """Its parts."""
        ...

    @property
    def param_groups(self) -> Sequence[dict[str, object]]:
        """torch's, of all parts."""
        ...

    def prepare_grads(self) -> object:
        """Copy the gradients to the masters."""
        ...

    def get_grad_norm(self) -> float:
        """Over all ranks."""
        ...

    def step_with_ready_grads(self) -> object:
        """Update."""
        ...
