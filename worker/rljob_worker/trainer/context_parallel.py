"""Context parallelism: ranks that have a share of each row's tokens, and in attention all tokens of a share of heads.

Two exchanges surround what looks at other tokens, as in DeepSpeed Ulysses (Jacobs et al., arXiv 2309.14509). All else
is computed token by token. A row is cut wherever its samples begin, and causal work is even, since each rank has all of
it for its heads. To Megatron the ranks are replicas, over which it adds up gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rljob_worker.errors import UserError
from rljob_worker.parallel_layout import ParallelLayout


def context_group(layout: ParallelLayout) -> dist.ProcessGroup | None:
    """The ranks that divide this rank's rows; None where it has them whole. Collective over all ranks."""
    own = None
    if layout.cp > 1:
        for first in layout.every_rank():
            if first.cp_rank == 0:
                members = [first.rank + number * layout.tp for number in range(layout.cp)]
                group = dist.new_group(members, group_desc="CONTEXT_PARALLEL_GROUP")
                own = group if layout.rank in members else own
    return own


def to_heads(shares: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """All tokens of a share of heads, of a share of the tokens of all heads; one exchange for all tensors.

    Args:
        shares: each [T / n, heads, width], of one dtype.
        group: the ranks that divide a row, in its order.

    Returns:
        Of each [T, heads / n, width], differentiable.

    Raises:
        UserError: heads that the ranks do not divide.
    """
    ranks = group.size()
    if uneven := [share.shape[1] for share in shares if share.shape[1] % ranks]:
        raise UserError(
            f"spec.training.contextParallel: {ranks} does not divide the {uneven[0]} heads of an attention layer"
        )
    widths = [share.shape[1] // ranks * share.shape[2] for share in shares]
    for_ranks = torch.cat([share.reshape(len(share), ranks, -1) for share in shares], dim=2).transpose(0, 1)
    received: Tensor = _Exchange.apply(for_ranks, group)
    parts = received.flatten(0, 1).split(widths, dim=1)
    return [part.unflatten(1, (-1, share.shape[2])) for part, share in zip(parts, shares, strict=True)]


def to_tokens(heads: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back: [T / n, heads, width] of [T, heads / n, width], differentiable."""
    received: Tensor = _Exchange.apply(heads.unflatten(0, (group.size(), -1)), group)
    return received.transpose(0, 1).flatten(1, 2)


def joined(own: Tensor, places: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """Values of all ranks, in the order of the row.

    All ranks compute the same loss of them; the gradient of a rank's own values is that of its own copy, so that the
    parameters' gradients of all ranks add up to the loss's.

    Args:
        own: [m, ...] of this rank.
        places: [m] int64, where they are among all; each place is one rank's.
        count: of all.
        group: the ranks that divide a row.

    Returns:
        [count, ...], equal on all ranks.
    """
    if not count:
        return own
    whole: Tensor = _Joined.apply(own, places, count, group)
    return whole


class _ExchangeContext(Protocol):
    group: dist.ProcessGroup


class _Exchange(torch.autograd.Function):
    """[n, ...], a part for each rank -> [n, ...], a part of each; its own inverse."""

    @staticmethod
    def forward(ctx: _ExchangeContext, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: _ExchangeContext, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _JoinedContext(Protocol):
    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Joined(torch.autograd.Function):
    """A sum in which each place is zero on all ranks but one: exact."""

    @staticmethod
    def forward(ctx: _JoinedContext, own: Tensor, places: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        whole = own.new_zeros(count, *own.shape[1:])
        whole[places] = own
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: _JoinedContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grad[places], None, None, None
