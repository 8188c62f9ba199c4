"""Rotary embedding in few passes against Megatron's own expression, bit for bit."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from rljob_worker.upstream.megatron_rotary import rotated

TOKENS, HEADS, SIZE = 37, 3, 16


def _angles(size: int) -> Tensor:
    """[T, 1, 1, size], of places as packed sequences have them."""
    places = torch.arange(TOKENS) % 11
    half = torch.outer(places.float(), 1e4 ** (-torch.arange(size // 2) / (size // 2)))
    return torch.cat([half, half], dim=-1)[:, None, None, :]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "scale"), [(SIZE, 1.0), (SIZE, 0.7), (SIZE // 2, 1.0)])
def test_bits_are_those_of_megatrons_own(dtype: torch.dtype, size: int, scale: float) -> None:
    from megatron.core.models.common.embeddings import rope_utils

    def of_megatron(values: Tensor, angles: Tensor) -> Tensor:
        assert rope_utils._apply_rotary_pos_emb_bshd is not rotated
        return rope_utils._apply_rotary_pos_emb_bshd(values, angles, mscale=scale)

    generator = torch.Generator().manual_seed(5)
    # A slice of a wider product, as the layers' queries and keys are.
    wide = torch.randn(TOKENS, 1, HEADS, 2 * SIZE, generator=generator).to(dtype)
    upper = torch.randn(TOKENS, 1, HEADS, SIZE, generator=generator).to(dtype)
    found = []
    for function in (of_megatron, lambda values, angles: rotated(values, angles, mscale=scale)):
        leaf = wide.clone().requires_grad_()
        result = function(leaf[..., :SIZE], _angles(size))
        (grad,) = torch.autograd.grad(result, leaf, upper)
        found.append((result, grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][0].is_contiguous()
    assert found[1][0].is_contiguous()


def test_gradients_are_those_of_the_values() -> None:
    torch.manual_seed(0)
    values = torch.randn(5, 1, 1, 6, dtype=torch.float64, requires_grad=True)
    angles = _angles(4)[:5].double()
    assert torch.autograd.gradcheck(lambda given: rotated(given, angles), values)


def test_cosines_are_computed_once_for_all_layers() -> None:
    angles, values = _angles(SIZE), torch.ones(TOKENS, 1, HEADS, SIZE)
    first = rotated(values, angles)
    with mock.patch.object(torch.Tensor, "cos", side_effect=AssertionError("computed again")):
        assert torch.equal(rotated(values, angles), first)
        with pytest.raises(AssertionError, match="computed again"):
            rotated(values, angles.clone())


@pytest.mark.parametrize("form", ["rotary_interleaved", "multi_latent_attention"])
def test_other_pairs_are_refused(form: str) -> None:
    with pytest.raises(NotImplementedError, match="interleaved"):
        rotated(torch.ones(TOKENS, 1, HEADS, SIZE), _angles(SIZE), **{form: True})
