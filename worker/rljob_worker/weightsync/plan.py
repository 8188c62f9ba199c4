"""Plan of a sync: the tensors of a checkpoint laid out in buckets, and the trainer that writes each part."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import torch
from pydantic import TypeAdapter

from rljob_worker.tensor_slice import Part, TensorSlice

DEFAULT_BUCKET_BYTES = 256 * 2**20
_ALIGNMENT = 64
_SMALLEST_BUCKET = 4 * 2**20
HOST_SLICE_BYTES = 8 * 2**20
"""Size of a slot in host memory: what one side has written is still in the cache when the other reads it."""
# One bucket is filled while another lands, so a sync in few buckets would mostly wait.
_BUCKETS_PER_SYNC = 8

_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
_FUSED |= {
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_z": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba",
    "in_proj_a": "in_proj_ba",
}
_EXPERT = re.compile(r"(.*\.experts)\.\d+\..*")


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """The part of a tensor that one trainer writes."""

    trainer: int
    part: Part


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A Hugging Face tensor, or some rows of one, at its place in a slot."""

    name: str
    shape: tuple[int, ...]
    """Shape of the placed tensor or piece."""
    offset: int
    """Bytes from the start of the slot."""
    nbytes: int
    pieces: tuple[PlacedPiece, ...]
    """Their parts are of what is placed."""
    first: int
    """Index in the tensor of the first row that is placed."""

    def rows_in(self, piece: PlacedPiece, held: Part) -> slice | None:
        """Rows of the shard `held` of the tensor that a piece is; None where it is not all there."""
        if piece.part.dim:
            return slice(self.first, self.first + self.shape[0]) if piece.part == held else None
        start, length = (0, self.shape[0]) if piece.part.dim is None else (piece.part.start, piece.part.length)
        start += self.first - held.start
        if held.dim or start < 0 or (held.dim == 0 and start + length > held.length):
            return None
        return slice(start, start + length)


Placed = tuple[PlacedTensor, PlacedPiece]
"""A piece, and what it is a piece of."""


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces of a bucket that one trainer writes and that have one digest, in the order in which it is over them."""

    trainer: int
    pieces: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are in a slot at the same time: whole engine modules."""

    index: int
    nbytes: int
    tensors: tuple[PlacedTensor, ...]

    def pieces_of(self, trainer: int) -> Iterator[tuple[PlacedTensor, PlacedPiece]]:
        """Pieces that one trainer writes, in order."""
        return ((tensor, piece) for tensor in self.tensors for piece in tensor.pieces if piece.trainer == trainer)

    def groups(self, by_piece: bool) -> tuple[Group, ...]:
        """Its pieces in groups: by trainer, and whole tensors apart from parts; or each for itself.

        A worker of an engine that is cut as the trainers are takes all pieces of a group, or none.
        """
        everything = [(tensor, piece) for tensor in self.tensors for piece in tensor.pieces]
        if by_piece:
            return tuple(Group(piece.trainer, ((tensor, piece),)) for tensor, piece in everything)
        groups: dict[tuple[int, bool], list[tuple[PlacedTensor, PlacedPiece]]] = {}
        for tensor, piece in everything:
            groups.setdefault((piece.trainer, piece.part.dim is not None), []).append((tensor, piece))
        return tuple(Group(trainer, tuple(pieces)) for (trainer, _), pieces in sorted(groups.items()))


@dataclass(frozen=True)
class SyncPlan:
    """The layout of every sync of a job; the same in all processes."""

    dtype: str
    """Name of the torch dtype of all tensors, e.g. `bfloat16`."""
    engines: int
    """Engines on the host; they are numbered from 0."""
    buckets: tuple[Bucket, ...]
    by_piece: bool = False
    """Each piece has a digest of its own, not each group."""

    @cached_property
    def groups(self) -> tuple[tuple[Group, ...], ...]:
        """By bucket, see `Bucket.groups`."""
        return tuple(bucket.groups(self.by_piece) for bucket in self.buckets)

    @cached_property
    def group_of(self) -> tuple[list[int], ...]:
        """By bucket: the number of the group of each piece, tensor by tensor."""
        found = []
        for bucket, groups in zip(self.buckets, self.groups, strict=True):
            number = {placed: number for number, group in enumerate(groups) for placed in group.pieces}
            found.append([number[tensor, piece] for tensor in bucket.tensors for piece in tensor.pieces])
        return tuple(found)

    @cached_property
    def slices(self) -> tuple[list[tuple[str, int]], ...]:
        """By bucket: name and first row of what is in it."""
        return tuple([(tensor.name, tensor.first) for tensor in bucket.tensors] for bucket in self.buckets)

    @cached_property
    def names_in(self) -> tuple[list[str], ...]:
        """By bucket: names of what is in it."""
        return tuple([tensor.name for tensor in bucket.tensors] for bucket in self.buckets)

    @cached_property
    def slot_bytes(self) -> int:
        """Size of each of the two slots."""
        return max(bucket.nbytes for bucket in self.buckets)

    @cached_property
    def writers(self) -> tuple[tuple[int, ...], ...]:
        """By bucket: the trainers that write into it, in order."""
        return tuple(
            tuple(sorted({piece.trainer for tensor in bucket.tensors for piece in tensor.pieces}))
            for bucket in self.buckets
        )

    @cached_property
    def trainers(self) -> tuple[int, ...]:
        """Ranks that send something."""
        return tuple(sorted(set().union(*self.writers)))

    @cached_property
    def buckets_of(self) -> dict[int, list[int]]:
        """Trainer -> the buckets that it writes into, in order."""
        return {
            trainer: [bucket for bucket, writers in enumerate(self.writers) if trainer in writers]
            for trainer in self.trainers
        }

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All tensors, in the order in which they land."""
        return tuple(self.shapes)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """All tensors -> their whole shapes, in the order in which they land."""
        rows: dict[str, int] = {}
        rest: dict[str, tuple[int, ...]] = {}
        for tensor in (tensor for bucket in self.buckets for tensor in bucket.tensors):
            rows[tensor.name] = rows.get(tensor.name, 0) + tensor.shape[0]
            rest[tensor.name] = tensor.shape[1:]
        return {name: (count, *rest[name]) for name, count in rows.items()}

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for bucket in self.buckets for tensor in bucket.tensors)

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch has it."""
        return dtype_named(self.dtype)

    @cached_property
    def fingerprint(self) -> str:
        """Equal in two processes when they work by the same plan."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def seen_from(self, node: Sequence[int]) -> SyncPlan:
        """The plan of a node's trainers alone: its first one stands for those elsewhere, whose pieces it is brought."""

        def stands(piece: PlacedPiece) -> PlacedPiece:
            return piece if piece.trainer in node else replace(piece, trainer=node[0])

        buckets = [
            replace(bucket, tensors=tuple(replace(t, pieces=tuple(map(stands, t.pieces))) for t in bucket.tensors))
            for bucket in self.buckets
        ]
        return replace(self, buckets=tuple(buckets))

    def to_json(self) -> str:
        """Text that `from_json` reads."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> SyncPlan:
        """The plan that `to_json` wrote."""
        return TypeAdapter(cls).validate_json(text)


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of that name; ValueError when there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not the name of a torch dtype")
    return dtype


def engine_module(hf_name: str) -> str:
    """The engine's module that a tensor is loaded into: its loader waits until all of a module's tensors are there."""
    expert = _EXPERT.fullmatch(hf_name)
    if expert:
        return expert[1]
    module = hf_name.rpartition(".")[0]
    parent, _, last = module.rpartition(".")
    return f"{parent}.{_FUSED[last]}" if last in _FUSED else module


def build_plan(
    manifest: Iterable[tuple[str, tuple[int, ...]]],
    pieces: Mapping[int, Sequence[TensorSlice]],
    *,
    dtype: torch.dtype,
    engines: int,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    slice_bytes: int | None = None,
) -> SyncPlan:
    """Lay the tensors out in buckets and divide the writing among the trainers.

    A bucket holds whole engine modules, so a slot can be larger than `bucket_bytes` when a module is. Small models get
    smaller buckets, for filling and landing to overlap. With `slice_bytes`, tensors are cut between rows instead, and
    no bucket is larger than that or than a row. Buckets are as even as they can be without becoming more.

    Args:
        manifest: name and shape of every tensor of the checkpoint, in checkpoint order.
        pieces: trainer (rank) -> the pieces it can send. What several hold is sent by the one with the least to send.
        dtype: of all tensors on the wire; trainers that hold another one round to it.
        engines: number of engines on the host.
        bucket_bytes: target size of a slot in bytes.
        slice_bytes: most bytes of a slot; None: whole modules.

    Raises:
        ValueError: a tensor that no set of pieces covers exactly once, one that is not in the manifest, or a wrong
            shape; names the tensor.
    """
    if bucket_bytes < 1 or engines < 1:
        raise ValueError(f"bucket_bytes ({bucket_bytes}) and engines ({engines}) must be at least 1")
    tensors = list(manifest)
    shapes = dict(tensors)
    if not shapes or len(shapes) != len(tensors):
        raise ValueError("the manifest of the weights is empty or names a tensor twice")
    covers = _assign(shapes, pieces, dtype.itemsize)
    sizes = _sizes(shapes, dtype)
    buckets: list[Bucket] = []
    for contents in _pack(shapes, sizes, bucket_bytes, slice_bytes):
        placed, offset = [], 0
        for rows in contents:
            shape = (rows.count, *shapes[rows.name][1:])
            placed_pieces = tuple(_pieces_in(rows, covers[rows.name], shapes[rows.name][0]))
            placed.append(PlacedTensor(rows.name, shape, offset, rows.nbytes, placed_pieces, rows.first))
            offset += _aligned(rows.nbytes)
        buckets.append(Bucket(len(buckets), offset, tuple(placed)))
    return SyncPlan(str(dtype).removeprefix("torch."), engines, tuple(buckets))


def slot_bytes(
    manifest: Iterable[tuple[str, tuple[int, ...]]],
    *,
    dtype: torch.dtype,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    slice_bytes: int | None = None,
) -> int:
    """Size of each slot of the plan that `build_plan` would make."""
    shapes = dict(manifest)
    buckets = _pack(shapes, _sizes(shapes, dtype), bucket_bytes, slice_bytes)
    return max(sum(_aligned(rows.nbytes) for rows in contents) for contents in buckets)


def largest_module(manifest: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """Elements of the largest engine module: what no bucket can be smaller than."""
    shapes = dict(manifest)
    return max(sum(math.prod(shapes[name]) for name in names) for names in _modules(shapes))


def _sizes(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, int]:
    return {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _modules(names: Iterable[str]) -> list[list[str]]:
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(engine_module(name), []).append(name)
    return list(modules.values())


@dataclass(frozen=True, slots=True)
class _Rows:
    """Consecutive rows of a tensor."""

    name: str
    first: int
    count: int
    nbytes: int


def _pack(
    shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int], bucket_bytes: int, slice_bytes: int | None
) -> Iterator[list[_Rows]]:
    target = min(bucket_bytes, max(_SMALLEST_BUCKET, -(-sum(sizes.values()) // _BUCKETS_PER_SYNC)))
    units = [[_Rows(name, 0, shapes[name][0], sizes[name]) for name in names] for names in _modules(shapes)]
    if slice_bytes is not None:
        target = min(target, slice_bytes)
        units = [[rows] for unit in units for whole in unit for rows in _cut(whole, target)]
    taken = [sum(_aligned(rows.nbytes) for rows in unit) for unit in units]
    bucket: list[_Rows] = []
    for unit, begins in zip(units, _beginnings(taken, _evenest(taken, target)), strict=True):
        if begins and bucket:
            yield bucket
            bucket = []
        bucket += unit
    yield bucket


def _beginnings(sizes: Iterable[int], target: int) -> Iterator[bool]:
    """Whether each of these begins a bucket, if buckets take at most `target`, or one that is larger than that."""
    filled = target
    for size in sizes:
        begins = filled + size > target
        filled = size if begins else filled + size
        yield begins


def _evenest(sizes: Sequence[int], target: int) -> int:
    """The least that makes no more buckets than `target`: one side fills a bucket in the time the other lands one."""
    count, least = sum(_beginnings(sizes, target)), 0
    while target - least > 1:
        middle = (least + target) // 2
        least, target = (least, middle) if sum(_beginnings(sizes, middle)) <= count else (middle, target)
    return target


def _cut(whole: _Rows, target: int) -> Iterator[_Rows]:
    """Even slices of at most `target` bytes, or of a row where that has more; two would never fit into one bucket."""
    row = whole.nbytes // whole.count
    slices = -(-whole.count // max(1, target // _ALIGNMENT * _ALIGNMENT // row))
    for index in range(slices):
        first, end = (whole.count * edge // slices for edge in (index, index + 1))
        yield _Rows(whole.name, first, end - first, (end - first) * row)


def _pieces_in(rows: _Rows, cover: Sequence[PlacedPiece], count: int) -> Iterator[PlacedPiece]:
    """The pieces of a tensor of so many rows, as parts of some of its rows."""
    if rows.count == count:
        yield from cover
        return
    for piece in cover:
        if piece.part.dim != 0:
            yield piece
            continue
        start = max(piece.part.start, rows.first)
        length = min(piece.part.start + piece.part.length, rows.first + rows.count) - start
        if length > 0:
            part = Part() if length == rows.count else Part(0, start - rows.first, length)
            yield PlacedPiece(piece.trainer, part)


def _assign(
    shapes: Mapping[str, tuple[int, ...]], pieces: Mapping[int, Sequence[TensorSlice]], itemsize: int
) -> dict[str, tuple[PlacedPiece, ...]]:
    holders: dict[str, dict[Part, set[int]]] = {name: {} for name in shapes}
    for trainer, held in sorted(pieces.items()):
        for piece in held:
            name = piece.hf_name
            if name not in shapes:
                raise ValueError(f"rank {trainer} holds {name}, which is not a tensor of the checkpoint")
            if tuple(piece.hf_shape) != tuple(shapes[name]):
                raise ValueError(
                    f"{name}: rank {trainer} takes its shape for {tuple(piece.hf_shape)}, "
                    f"the checkpoint says {tuple(shapes[name])}"
                )
            holders[name].setdefault(piece.part, set()).add(trainer)
    load = dict.fromkeys(pieces, 0)
    covers = {}
    for name, shape in shapes.items():
        parts = sorted(holders[name], key=lambda part: (part.dim is not None, part.dim or 0, part.start))
        _check_cover(name, shape, parts)
        cover = []
        for part in parts:
            trainer = min(holders[name][part], key=lambda rank: (load[rank], rank))
            share = math.prod(shape) if part.dim is None else math.prod(shape) // shape[part.dim] * part.length
            load[trainer] += share * itemsize
            cover.append(PlacedPiece(trainer, part))
        covers[name] = tuple(cover)
    return covers


def _check_cover(name: str, shape: tuple[int, ...], parts: Sequence[Part]) -> None:
    if not parts:
        raise ValueError(f"{name}: no rank sends it")
    if parts == [Part()]:
        return
    dims = {part.dim for part in parts}
    dim = parts[0].dim
    if len(dims) > 1 or dim is None or not 0 <= dim < len(shape):
        raise ValueError(
            f"{name}: its pieces are cut along different or impossible dimensions: {sorted(map(str, dims))}"
        )
    reached = 0
    for part in parts:
        if part.start != reached or part.length < 1:
            raise ValueError(
                f"{name}: its pieces do not cover dimension {dim} exactly once: after index {reached} comes a piece "
                f"of {part.length} from {part.start}"
            )
        reached += part.length
    if reached != shape[dim]:
        raise ValueError(f"{name}: its pieces cover {reached} of {shape[dim]} along dimension {dim}")
