"""Products with weights that torch has packed for oneDNN, and new weights in the memory of packed ones.

oneDNN packs a weight [rows, columns] in blocks of rows, of which there can be one: [rows / block, columns / v, block,
v], where v elements make 32 bits. Each pack takes new memory, whose pages cost more than the packing; writing into the
old one in this order does not.
"""

from __future__ import annotations

import ctypes

import torch

_FOR_ROWS = 128
"""Rows of the other factor that the order is chosen for. For fewer, oneDNN leaves weights whose rows are a multiple of
1024 as they are on some CPUs (Zen 4), where products of 16 to 64 rows then take 2 to 6 times as long."""
_BLOCKS = (64, 48, 32, 16)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight [rows, columns], packed; RuntimeError where this CPU has no packed products for its dtype."""
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise RuntimeError("oneDNN has no products in bfloat16 on this CPU")
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _FOR_ROWS)
    return packed


def multiply(packed: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias`."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return product


def block_of(packed: torch.Tensor, weight: torch.Tensor) -> int | None:
    """Rows in a block of `packed`, which was made of `weight`; None when it is in no order that is known here."""
    for block in (*_BLOCKS, len(weight)):
        if _fits(packed, weight, block) and torch.equal(*_same_order(packed, weight, block)):
            return block
    return None


def repack(packed: torch.Tensor, weight: torch.Tensor, block: int) -> None:
    """Make `packed` what `pack(weight)` would be, in its own memory; `block` as `block_of` has it."""
    ours, theirs = _same_order(packed, weight, block)
    # As float32, whose strided copies torch vectorizes: twice as fast as int32's, and copies change no bits.
    ours.view(torch.float32).copy_(theirs.view(torch.float32))


def _fits(packed: torch.Tensor, weight: torch.Tensor, block: int) -> bool:
    rows, columns = weight.shape
    whole = rows % block == 0 and columns * weight.itemsize % 4 == 0 and weight.is_contiguous()
    return whole and torch.ops.mkldnn._nbytes(packed) == weight.nbytes


def _same_order(packed: torch.Tensor, weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of both as int32 [rows / block, columns / v, block]."""
    rows, words = weight.shape[0], weight.shape[1] * weight.itemsize // 4
    memory = (ctypes.c_char * weight.nbytes).from_address(torch.ops.mkldnn.data_ptr(packed))
    ours = torch.frombuffer(memory, dtype=torch.int32).view(rows // block, words, block)
    return ours, weight.detach().view(torch.int32).view(rows // block, block, words).transpose(1, 2)
