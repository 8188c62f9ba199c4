"""Megatron's rotary embedding on CPU in as few passes as torch allows.

Megatron computes the same cosines in each layer, twice, and its expression is made of slices and halves, whose
gradients are tensors of zeros into which a part is copied: on CPU that is a tenth of a training step of a small model.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rljob_worker.upstream.patch import MEGATRON, MEGATRON_BACKEND, Patch, Process, put

_COMPUTED = "rljob_cosine_and_sine"


def rotated(
    values: Tensor,
    angles: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
) -> Tensor:
    """Queries or keys turned by the angles of their positions, to the bits of Megatron's own expression.

    Args:
        values: [T, B, H, D].
        angles: [T, 1, 1, R] float32, the same in both halves of the last axis; entries of `values` from R on stay.
        rotary_interleaved: not supported, as no model here has it.
        multi_latent_attention: the same.
        mscale: factor of cosines and sines.

    Raises:
        NotImplementedError: pairs that are not a head's halves.
    """
    if rotary_interleaved or multi_latent_attention:
        raise NotImplementedError("rotary embedding of interleaved pairs")
    size = angles.shape[-1]
    turned: Tensor = _Rotated.apply(values[..., :size], *_cosine_and_sine(angles, mscale, values.dtype))
    return turned if size == values.shape[-1] else torch.cat((turned, values[..., size:]), dim=-1)


def _cosine_and_sine(angles: Tensor, mscale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both, kept at the angles: these are one tensor for all layers, and are gone after them."""
    kept: dict[tuple[float, torch.dtype], tuple[Tensor, Tensor]] = angles.__dict__.setdefault(_COMPUTED, {})
    found = kept.get((mscale, dtype))
    if found is None:
        cosine, sine = angles.cos(), angles.sin()
        if mscale != 1.0:
            cosine, sine = cosine * mscale, sine * mscale
        found = kept[mscale, dtype] = cosine.to(dtype), sine.to(dtype)
    return found


class _Context(Protocol):
    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Rotated(torch.autograd.Function):
    """values * cosine + (-second half, first half) * sine."""

    @staticmethod
    def forward(ctx: _Context, values: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        result = values * cosine
        (first, second), (of_first, of_second) = values.chunk(2, dim=-1), sine.chunk(2, dim=-1)
        result_first, result_second = result.chunk(2, dim=-1)
        result_first -= second * of_first
        result_second += first * of_second
        return result

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        result = grad * cosine
        (first, second), (of_first, of_second) = grad.chunk(2, dim=-1), sine.chunk(2, dim=-1)
        result_first, result_second = result.chunk(2, dim=-1)
        result_first += second * of_second
        result_second -= first * of_first
        return result, None, None


def _rotary() -> None:
    from megatron.core.models.common.embeddings import rope_utils

    put(rope_utils, _apply_rotary_pos_emb_bshd=rotated)


PATCHES = (
    Patch(
        "megatron-rotary-on-cpu",
        ("megatron.core.models.common.embeddings.rope_utils._apply_rotary_pos_emb_bshd",),
        {"megatron-core": MEGATRON},
        "it computes the same cosines for each layer's queries and keys, and its gradient is made of copies into zeros",
        "tests/worker/upstream/test_rotary.py::test_bits_are_those_of_megatrons_own",
        _rotary,
        (Process.TRAINER,),
        ("cpu",),
        backend=MEGATRON_BACKEND,
    ),
)
