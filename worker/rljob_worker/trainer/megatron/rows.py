"""Rows of sequences as Megatron's layers take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rljob_worker.trainer.batches import MicroBatch

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

    from rljob_worker.upstream.megatron_types import RotaryEmbedding


def packed_seq_params(micro_batch: MicroBatch) -> PackedSeqParams:
    """Parameters that Megatron passes on, through recomputation and pipeline stages, to `kernels.CausalAttention`.

    Only the format `thd` changes shapes in megatron-core 0.16, and turns the rotary embedding into a loop over
    sequences that waits for the device. By any other name it goes to core attention untouched. The bounds stay on the
    host, where kernels read them. Where prompts are shared, the last field that has no use by another name than `thd`
    says which segments go on from which.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds, longest = torch.from_numpy(micro_batch.bounds), micro_batch.longest
    prefixes = None if micro_batch.prefixes is None else torch.from_numpy(micro_batch.prefixes)
    return PackedSeqParams(
        qkv_format="sbhd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_kv_padded=prefixes,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


class PositionRotary(torch.nn.Module):
    """Megatron's rotary embedding at each token's place in its own sequence, not in the row."""

    positions: Tensor
    """[T] int64, on the model's device: of the row whose turn it is. Megatron asks once, as a forward pass begins."""

    def __init__(self, inner: RotaryEmbedding) -> None:
        super().__init__()
        self.inner = inner
        # Of the row's longest sequence, which Megatron's own reads from `packed_seq_params`.
        self.get_rotary_seq_len = inner.get_rotary_seq_len

    def forward(self, longest: int, **kwargs: object) -> Tensor:
        """Angles [T, 1, 1, D] of the positions, all below `longest`."""
        return self.inner(longest, **kwargs).index_select(0, self.positions)
