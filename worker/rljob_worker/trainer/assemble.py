"""Whole tensors of a checkpoint from the parts that ranks have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from rljob_worker.models.manifest import Manifest
from rljob_worker.tensor_slice import Piece


def assemble(pieces_by_rank: Iterable[Piece], manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Put HF tensors together from the pieces of all ranks, in the manifest's order, one tensor at a time.

    Pieces that overlap (replicated parameters, data-parallel copies) must agree bit for bit.

    Args:
        pieces_by_rank: the pieces of every rank's shard, one rank after the other.
        manifest: which tensors there must be.

    Raises:
        ValueError: a tensor is not fully covered, or covered twice with different values; names it.
    """
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces_by_rank:
        by_name.setdefault(piece.hf_name, []).append(piece)
    for name, shape in manifest:
        yield name, _join(name, shape, by_name.pop(name, []))
    if by_name:
        raise ValueError(f"tensor {next(iter(by_name))} does not belong to this model")


def _join(name: str, shape: tuple[int, ...], pieces: list[Piece]) -> torch.Tensor:
    if not pieces:
        raise ValueError(f"tensor {name} is missing: no shard holds it")
    if any(piece.hf_shape != shape for piece in pieces):
        raise ValueError(f"tensor {name}: shards are of {sorted({p.hf_shape for p in pieces})}, expected {shape}")
    dims = {piece.dim for piece in pieces if piece.dim is not None}
    if len(dims) > 1:
        raise ValueError(f"tensor {name} is cut along several dimensions: {sorted(dims)}")
    dim = dims.pop() if dims else 0
    whole = torch.empty(0)
    covered = 0
    for piece in sorted(pieces, key=lambda piece: piece.start):
        shard = piece.read()
        length = shape[dim] if piece.dim is None else piece.length
        if whole.shape != shape:
            whole = torch.empty(shape, dtype=shard.dtype)
        if shard.dtype != whole.dtype:
            raise ValueError(f"tensor {name}: shards differ in dtype, {whole.dtype} and {shard.dtype}")
        if piece.start > covered:
            break
        overlap = min(covered - piece.start, length)
        if not _same_bits(whole.narrow(dim, piece.start, overlap), shard.narrow(dim, 0, overlap)):
            raise ValueError(
                f"tensor {name} is covered twice with different values, from index {piece.start} of dim {dim}"
            )
        whole.narrow(dim, covered, length - overlap).copy_(shard.narrow(dim, overlap, length - overlap))
        covered = max(covered, piece.start + length)
    if covered < shape[dim]:
        raise ValueError(
            f"tensor {name} is not fully covered: nothing holds index {covered} of dim {dim} ({shape[dim]})"
        )
    return whole


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
