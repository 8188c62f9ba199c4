"""Linear attention by the gated delta rule (Yang et al., arXiv 2412.06464), as Qwen3.5 has it in three layers of four.

The parameters are those of megatron-core's `ssm.gated_delta_net.GatedDeltaNet`, by its names; what is computed is
transformers' `Qwen3_5GatedDeltaNet`. Megatron's own module is not used: it refuses to be made without the package
`fla`, takes the decay's exponential in bf16, and leaves the gradient of the output's norm unreduced over
tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rljob_worker.models.facts import LinearAttention
from rljob_worker.trainer.context_parallel import to_heads, to_tokens

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import ModuleSpec

CHUNK = 64
"""Positions that the delta rule takes at a time; a sequence is padded to whole chunks."""
_L2_EPSILON = 1e-6


class _Config(Protocol):
    hidden_size: int
    layernorm_epsilon: float
    init_method: Callable[[Tensor], None]
    output_layer_init_method: Callable[[Tensor], None]
    params_dtype: torch.dtype
    sequence_parallel: bool


@dataclass(frozen=True, slots=True)
class _Heads:
    """Parameters of the heads that a rank computes the state of, and the widths of their keys and values."""

    key_width: int
    value_width: int
    convolution: Tensor
    """[2 key_width + value_width, 1, kernel]."""
    dt_bias: Tensor
    A_log: Tensor


@dataclass
class GatedDeltaNetSubmodules:
    """Megatron's parallel matrices."""

    in_proj: type[torch.nn.Module]
    out_proj: type[torch.nn.Module]


def gated_delta_net_spec(sizes: LinearAttention) -> ModuleSpec:
    """Replacement of a layer's self-attention."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    return ModuleSpec(
        module=GatedDeltaNet,
        params={"sizes": sizes},
        submodules=GatedDeltaNetSubmodules(ColumnParallelLinear, RowParallelLinear),
    )


class GatedDeltaNet(torch.nn.Module):
    """A tensor-parallel rank's heads of one layer.

    Args:
        config: Megatron's.
        submodules: of its matrices.
        sizes: of the whole layer.
        pg_collection: Megatron's process groups.

    Attributes:
        context_group: the ranks that divide each row; None where this one has whole rows.

    Raises:
        ValueError: heads that the ranks cannot share, or sequence parallelism.
    """

    context_group: dist.ProcessGroup | None = None

    def __init__(
        self,
        config: _Config,
        submodules: GatedDeltaNetSubmodules,
        sizes: LinearAttention,
        pg_collection: ProcessGroupCollection,
        **_kwargs: object,
    ) -> None:
        super().__init__()
        ranks = pg_collection.tp.size()
        if sizes.key_heads % ranks or config.sequence_parallel:
            raise ValueError(
                f"{sizes.key_heads} key heads over {ranks} ranks, sequence parallelism {config.sequence_parallel}: "
                "linear attention takes a number of ranks that divides its key heads, and no sequence parallelism"
            )
        self.sizes, self.eps = sizes, config.layernorm_epsilon
        self.tp_group = pg_collection.tp
        self._heads = sizes.value_heads // ranks
        self._key_width, self._value_width = sizes.key_width // ranks, sizes.value_width // ranks
        widths = 2 * sizes.key_width + 2 * sizes.value_width + 2 * sizes.value_heads
        self.in_proj = submodules.in_proj(
            config.hidden_size,
            widths,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            tp_group=self.tp_group,
        )
        channels = 2 * self._key_width + self._value_width
        self.conv1d = torch.nn.Conv1d(
            channels,
            channels,
            sizes.kernel_size,
            groups=channels,
            bias=False,
            padding=sizes.kernel_size - 1,
            dtype=config.params_dtype,
        )
        self.dt_bias = torch.nn.Parameter(torch.ones(self._heads, dtype=config.params_dtype))
        self.A_log = torch.nn.Parameter(torch.zeros(self._heads, dtype=config.params_dtype))
        for own in (self.conv1d.weight, self.dt_bias, self.A_log):
            # Megatron counts a parameter without the mark on one rank only, when it takes the norm of the gradients.
            setattr(own, "tensor_model_parallel", True)  # noqa: B010
        self.out_norm = torch.nn.RMSNorm(sizes.value_head_dim, eps=self.eps, dtype=config.params_dtype)
        self.out_proj = submodules.out_proj(
            sizes.value_width,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def forward(
        self, hidden: Tensor, *_args: object, packed_seq_params: PackedSeqParams | None = None, **options: object
    ) -> tuple[Tensor, None]:
        """[S, B, H] of [S, B, H], causal: of a row of sequences with their bounds, or of a batch of equal ones.

        Where a row is divided, S are this rank's tokens of it, and the bounds are the whole row's.
        """
        if any(options.get(name) is not None for name in ("attention_mask", "inference_context", "attention_bias")):
            raise ValueError("linear attention takes no mask, bias or cache: give the bounds of the row's sequences")
        if packed_seq_params is not None and packed_seq_params.cu_seqlens_kv_padded is not None:
            raise ValueError("linear attention takes no rows with shared prompts: its state runs over each sample")
        key, value, heads = self._key_width, self._value_width, self._heads
        projected = self.in_proj(hidden)[0].transpose(0, 1)
        mixed, gate, beta, decay = projected.split((2 * key + value, value, heads, heads), dim=-1)
        if packed_seq_params is None:
            context = self._context(self._all_heads(), mixed, beta, decay)
        else:
            of_row = self._of_row if self.context_group is None else self._of_divided_row
            context = of_row(packed_seq_params.cu_seqlens_q.tolist(), mixed[0], beta[0], decay[0]).unsqueeze(0)
        gated = self._norm(context) * F.silu(gate.unflatten(-1, (-1, self.sizes.value_head_dim)).float())
        return self.out_proj(gated.flatten(2).to(hidden.dtype).transpose(0, 1).contiguous())[0], None

    def _all_heads(self) -> _Heads:
        return _Heads(self._key_width, self._value_width, self.conv1d.weight, self.dt_bias, self.A_log)

    def _share_of_heads(self, group: dist.ProcessGroup) -> _Heads:
        ranks, rank = group.size(), group.rank()
        widths = (self._key_width, self._key_width, self._value_width)
        of_kinds = self.conv1d.weight.split(widths)
        convolution = torch.cat([kind.chunk(ranks)[rank] for kind in of_kinds])
        own = (self.dt_bias.chunk(ranks)[rank], self.A_log.chunk(ranks)[rank])
        return _Heads(self._key_width // ranks, self._value_width // ranks, convolution, *own)

    def _of_divided_row(self, bounds: list[int], mixed: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        """`_of_row` of this rank's tokens, given theirs: the state runs over the whole row for a share of heads."""
        group, sizes = self.context_group, self.sizes
        assert group is not None
        query, key, value = mixed.split((self._key_width, self._key_width, self._value_width), dim=-1)
        heads = [part.unflatten(-1, (-1, sizes.key_head_dim)) for part in (query, key)]
        heads.append(value.unflatten(-1, (-1, sizes.value_head_dim)))
        *parts, beta, decay = to_heads([*heads, beta.unsqueeze(-1), decay.unsqueeze(-1)], group)
        mixed = torch.cat([part.flatten(1) for part in parts], dim=-1)
        own = self._share_of_heads(group)
        return to_tokens(self._of_row(bounds, mixed, beta.squeeze(-1), decay.squeeze(-1), heads=own), group)

    def _of_row(self, bounds: list[int], *row: Tensor, heads: _Heads | None = None) -> Tensor:
        """`_context` [T, N, V] of the sequences of a row, given its [T, ...]; of all heads, or of a share of them."""
        own = heads or self._all_heads()
        lengths = [end - start for start, end in pairwise(bounds)]
        groups = [list(group) for _, group in groupby(lengths, key=lambda length: -(-length // CHUNK))]
        parts = zip(*(given.split([sum(group) for group in groups]) for given in row), strict=True)
        return torch.cat([self._of_group(own, group, *part) for group, part in zip(groups, parts, strict=True)])

    def _of_group(self, heads: _Heads, lengths: list[int], *row: Tensor) -> Tensor:
        """The same of neighbours that are as many chunks long, to which the rule pads each of them anyway."""
        longest = max(lengths)
        if min(lengths) == longest:
            return self._context(heads, *(given.unflatten(0, (-1, longest)) for given in row)).flatten(0, 1)
        places = [number * longest + place for number, length in enumerate(lengths) for place in range(length)]
        index = torch.tensor(places).to(row[0].device)
        size = len(lengths) * longest
        batch = (given.new_zeros(size, *given.shape[1:]).index_copy(0, index, given) for given in row)
        context = self._context(heads, *(given.unflatten(0, (-1, longest)) for given in batch))
        return context.flatten(0, 1).index_select(0, index)

    def _context(self, heads: _Heads, mixed: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        """[B, S, N, V] float32 of what the input is projected to: [B, S, channels] and twice [B, S, N]."""
        key, value = heads.key_width, heads.value_width
        query, keys, values = _convolved(mixed, heads.convolution).split((key, key, value), dim=-1)
        return _delta_rule(
            self._shared(_normalized(query.unflatten(-1, (-1, self.sizes.key_head_dim)))),
            self._shared(_normalized(keys.unflatten(-1, (-1, self.sizes.key_head_dim)))),
            values.unflatten(-1, (-1, self.sizes.value_head_dim)).float(),
            -heads.A_log.float().exp() * F.softplus(decay.float() + heads.dt_bias.float()),
            beta.float().sigmoid(),
        )

    def _shared(self, heads: Tensor) -> Tensor:
        return heads.repeat_interleave(self.sizes.value_heads // self.sizes.key_heads, dim=2)

    def _norm(self, context: Tensor) -> Tensor:
        """Norm of each head; all ranks have the same weight, so its gradient is the sum of theirs."""
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.tp_group)
        return F.rms_norm(context, weight.shape, weight.float(), self.eps)


def _convolved(mixed: Tensor, weight: Tensor) -> Tensor:
    """[B, S, channels] of the same, each channel over positions before it and its own, by weights [channels, 1, k]."""
    length = mixed.shape[1]
    made = F.conv1d(mixed.transpose(1, 2), weight, padding=weight.shape[2] - 1, groups=len(weight))
    return F.silu(made[..., :length]).transpose(1, 2)


def _normalized(heads: Tensor) -> Tensor:
    """Each head to length 1, in fp32."""
    heads = heads.float()
    return heads * torch.rsqrt(heads.square().sum(dim=-1, keepdim=True) + _L2_EPSILON)


def _delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """[B, S, N, V]: each position's query of the state that the positions up to it have written, in chunks.

    The state S of a head, [K, V], becomes exp(decay) S + beta k (v - k^T exp(decay) S)^T at each position (equation 10
    of the paper). Megatron's form in plain torch operators; its kernel, of the package `fla`, needs Triton.

    Args:
        query: [B, S, N, K] float32, each head of length 1.
        key: the same.
        value: [B, S, N, V] float32.
        decay: [B, S, N] float32, logarithms, at most 0.
        beta: [B, S, N] float32, between 0 and 1.
    """
    from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule

    context: Tensor = torch_chunk_gated_delta_rule(query, key, value, g=decay, beta=beta)[0]
    return context
