"""The gated activation against its formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rljob_worker.trainer.megatron.models.kernels import SwiGLU


def test_gradients_are_those_of_the_values() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(3, 2, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(SwiGLU(), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_the_formula(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(5, 12).to(dtype)
    kept = inputs.clone()
    torch.testing.assert_close(SwiGLU()(inputs), F.silu(inputs[:, :6]) * inputs[:, 6:], rtol=0, atol=0)
    assert torch.equal(inputs, kept)
