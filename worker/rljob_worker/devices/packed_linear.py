"""Products with weights that torch has packed for oneDNN, and new weights in the memory of packed ones.

oneDNN keeps a weight [rows, columns] in an order that depends on the CPU: blocks of rows, of which there can be one,
[rows / block, columns / v, block, v], where v elements make 32 bits or v is 1; without AVX-512 as it was. Each pack
takes new memory, whose pages cost more than the packing; writing into the old one in this order does not.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

_FOR_ROWS = 128
"""Rows of the other factor that the order is chosen for. For fewer, oneDNN leaves weights whose rows are a multiple of
1024 as they are on some CPUs (Zen 4), where products of 16 to 64 rows then take 2 to 6 times as long."""
_BLOCKS = (64, 48, 32, 16, 1)
# What keeps its bits, and whose strided copies torch vectorizes: those of int32 take twice as long as float32's.
_WORDS = {4: torch.float32, 2: torch.int16}


class Order(NamedTuple):
    """Layout of a packed weight's elements: rows in a block, and the bytes of a row that stay together."""

    block: int
    word: int


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


def order_of(packed: torch.Tensor, weight: torch.Tensor) -> Order | None:
    """Order of `packed`, which was made of `weight`; None when it is none that is known here."""
    for block in (*_BLOCKS, len(weight)):
        for word in sorted({4, weight.itemsize}, reverse=True):
            order = Order(block, word)
            if _fits(packed, weight, order) and _same(*_in_order(packed, weight, order)):
                return order
    return None


def repack(packed: torch.Tensor, weight: torch.Tensor, order: Order) -> None:
    """Make `packed` what `pack(weight)` would be, in its own memory; `order` as `order_of` has it."""
    ours, theirs = _in_order(packed, weight, order)
    ours.copy_(theirs)


def _fits(packed: torch.Tensor, weight: torch.Tensor, order: Order) -> bool:
    rows, columns = weight.shape
    whole = rows % order.block == 0 and columns * weight.itemsize % order.word == 0 and weight.is_contiguous()
    return whole and torch.ops.mkldnn._nbytes(packed) == weight.nbytes


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether the bits are: as floats, two NaN would differ."""
    bits = torch.int32 if ours.itemsize == 4 else torch.int16
    return torch.equal(ours.view(bits), theirs.view(bits))


def _in_order(packed: torch.Tensor, weight: torch.Tensor, order: Order) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of both as words [rows / block, words of a row, block]."""
    rows, words, block = weight.shape[0], weight.shape[1] * weight.itemsize // order.word, order.block
    dtype = _WORDS[order.word]
    memory = (ctypes.c_char * weight.nbytes).from_address(torch.ops.mkldnn.data_ptr(packed))
    ours = torch.frombuffer(memory, dtype=dtype).view(rows // block, words, block)
    return ours, weight.detach().view(dtype).view(rows // block, block, words).transpose(1, 2)
