from __future__ import annotations

import pytest
import torch

from rljob_worker.devices import packed_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(768, 256), (64, 128), (2304, 64), (96, 130)])
def test_new_weights_in_the_memory_of_packed_ones_are_what_a_pack_makes(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("no products in bfloat16 on this CPU")
    old, new, x = (torch.randn(rows, shape[1]).to(dtype) for rows in (shape[0], shape[0], 5))
    packed = packed_linear.pack(old)
    address = torch.ops.mkldnn.data_ptr(packed)
    order = packed_linear.order_of(packed, old)
    assert packed_linear.order_of(packed, new) is None
    if order is None:
        padded = torch.ops.mkldnn._nbytes(packed) > old.nbytes
        assert padded, "padded rows are in no order that is known, but these need no padding"
        return
    packed_linear.repack(packed, new, order)
    assert torch.ops.mkldnn.data_ptr(packed) == address
    expected = packed_linear.multiply(packed_linear.pack(new), x, None)
    assert torch.equal(packed_linear.multiply(packed, x, None), expected)
    assert not torch.equal(packed_linear.multiply(packed_linear.pack(old), x, None), expected)
