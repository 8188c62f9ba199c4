"""A checkpoint's parameters and optimizer state for a rank of another parallel layout than the one that saved it.

What lies where follows from the mapping to Hugging Face tensors, by which weights are exported and handed to engines:
Adam's moments are cut as the parameters that they belong to. Megatron's own way, `dist_checkpointing`, reads states of
its own format alone, whose metadata are pickled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rljob_api.wire.values import block
from rljob_worker.models.config import ModelConfig
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.tensor_slice import Piece, TensorSlice
from rljob_worker.trainer.megatron.models.convert import is_expert, local_pieces
from rljob_worker.trainer.state_file import StateReader, path_of

MODEL_PREFIX = "model."


def layout_of(reader: StateReader) -> ParallelLayout:
    """The layout of the rank that saved a file; ValueError when it has none."""
    return ParallelLayout.of_coordinates(block(reader.metadata.get("coordinates"), f"{reader.path}: coordinates"))


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a part of a Hugging Face tensor was saved."""

    place: TensorSlice
    rank: int
    parameter: str


class SavedState:
    """What all ranks saved, by the parameters of a rank of any layout; reads what it is asked for.

    Args:
        folder: a checkpoint.
        config: the model's.

    Raises:
        ValueError: files are missing, damaged, or of another model; names the file or the tensor.
    """

    def __init__(self, folder: str | Path, config: ModelConfig) -> None:
        self._folder = Path(folder)
        self._config = config
        self._readers: dict[int, StateReader] = {}
        self.layout = layout_of(self._reader(0))
        self._ranks = self.layout.every_rank()
        self._sources: dict[str, list[_Source]] = {}
        for at in self._ranks:
            if at.dp_rank == 0 or at.expert_dp_rank == 0:
                self._index(at)
        self._last: tuple[tuple[str, int, str], list[Piece]] | None = None

    def fill(self, kind: str, parameter: str, target: Tensor, layout: ParallelLayout) -> None:
        """Write what was saved of a parameter into a tensor of its shape in `layout`; padding stays as it is.

        Args:
            kind: `model.`, or the prefix of a tensor of the optimizer.
            parameter: Megatron's name of it on that rank.
            target: to be written.
            layout: of the rank that asks.
        """
        for piece in local_pieces({parameter: target}, self._config, layout):
            piece.write(self._part(kind, piece))

    def updates_of(self, parameter: str, target: Tensor, layout: ParallelLayout) -> float:
        """How often the optimizer updated a parameter."""
        counts = {
            float(reader.read(name))
            for piece in local_pieces({parameter: target}, self._config, layout)
            for source, _ in self._overlapping(piece)
            for reader, name in self._shards("step.", source)
        }
        if not counts:
            # Rows that only fill up the vocabulary: they have no gradient.
            return 0.0
        if len(counts) != 1:
            raise ValueError(f"{self._folder}: parts of {parameter} were updated {sorted(counts)} times: not one state")
        return counts.pop()

    def _reader(self, rank: int) -> StateReader:
        if rank not in self._readers:
            self._readers[rank] = StateReader(path_of(self._folder, rank))
        return self._readers[rank]

    def _index(self, at: ParallelLayout) -> None:
        reader = self._reader(at.rank)
        if layout_of(reader) != at:
            raise ValueError(f"{reader.path}: was saved by {layout_of(reader)}, rank 0 beside it by {self.layout}")
        for name in reader.names:
            if name.startswith(MODEL_PREFIX):
                parameter = name.removeprefix(MODEL_PREFIX)
                shape = torch.empty(reader.shape(name), device="meta")
                for piece in local_pieces({parameter: shape}, self._config, at):
                    if piece.primary:
                        source = _Source(piece.place, at.rank, parameter)
                        self._sources.setdefault(piece.hf_name, []).append(source)

    def _part(self, kind: str, wanted: TensorSlice) -> Tensor:
        whole: Tensor | None = None
        covered, length = 0, wanted.length
        for source, dim in self._overlapping(wanted):
            saved = next(piece for piece in self._saved(kind, source) if piece.place == source.place)
            part = saved.read()
            if whole is None:
                whole = torch.empty(wanted.shape, dtype=part.dtype)
            there, here = _span(source.place, dim), _span(wanted, dim)
            start, end = max(there.start, here.start), min(there.stop, here.stop)
            whole.narrow(dim, start - here.start, end - start).copy_(part.narrow(dim, start - there.start, end - start))
            covered, length = covered + end - start, len(here)
        if whole is None or covered != length:
            raise ValueError(f"{self._folder}: {wanted.hf_name}: {covered} of {length} rows or columns were saved")
        return whole

    def _overlapping(self, wanted: TensorSlice) -> Iterator[tuple[_Source, int]]:
        """Sources that have something of it, and along which dimension they are cut."""
        for source in self._sources.get(wanted.hf_name, []):
            dims = {place.dim for place in (source.place, wanted) if place.dim is not None}
            dim = dims.pop() if dims else 0
            there, here = _span(source.place, dim), _span(wanted, dim)
            if max(there.start, here.start) < min(there.stop, here.stop):
                yield source, dim

    def _saved(self, kind: str, source: _Source) -> list[Piece]:
        """The Hugging Face tensors in a saved parameter; the last one is kept, for it may hold several."""
        key = (kind, source.rank, source.parameter)
        if self._last is None or self._last[0] != key:
            tensor = self._whole(kind, source)
            pieces = local_pieces({source.parameter: tensor}, self._config, self._ranks[source.rank])
            self._last = key, pieces
        return self._last[1]

    def _whole(self, kind: str, source: _Source) -> Tensor:
        """A saved parameter, or the optimizer's tensor of it, of which each replica saved a part."""
        if kind == MODEL_PREFIX:
            return self._reader(source.rank).read(kind + source.parameter)
        shape = self._reader(source.rank).shape(MODEL_PREFIX + source.parameter)
        parts = [reader.read(name) for reader, name in self._shards(kind, source)]
        elements = sum(part.numel() for part in parts)
        if elements != math.prod(shape):
            raise ValueError(
                f"{self._folder}: {kind}{source.parameter} of rank {source.rank} and its replicas has {elements} "
                f"elements, its parameter {math.prod(shape)}"
            )
        return torch.cat(parts).view(shape)

    def _shards(self, kind: str, source: _Source) -> Iterator[tuple[StateReader, str]]:
        """The files that have the optimizer's parts of a parameter, from its first element to its last."""
        name = kind + source.parameter
        for rank in self._ranks[source.rank].replicas(experts=is_expert(source.parameter)):
            reader = self._reader(rank)
            if name in reader.names:
                yield reader, name


def _span(place: TensorSlice, dim: int) -> range:
    return range(place.hf_shape[dim]) if place.dim is None else range(place.start, place.start + place.length)
