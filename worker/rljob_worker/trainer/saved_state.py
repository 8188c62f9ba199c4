"""A checkpoint's parameters and optimizer state for a rank of another backend or layout than the one that saved it.

What lies where follows from the mapping to Hugging Face tensors, by which weights are exported and handed to engines:
Adam's moments are cut as the parameters that they belong to. Megatron's own way, `dist_checkpointing`, reads states of
its own format alone, whose metadata are pickled.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, cast

import torch
from torch import Tensor

from rljob_api.json_types import Json
from rljob_api.spec import LoraSpec, TrainingBackend
from rljob_api.wire.values import block, whole
from rljob_worker.models.manifest import Manifest
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.tensor_slice import Piece, TensorSlice
from rljob_worker.trainer.state_file import POLICY, StateReader, path_of

MODEL_PREFIX = "model."
MASTER_PREFIX = "master."
LORA, BASE = "lora", "base"
"""In the metadata of a file with adapters: what they are, and digests of the weights that they belong to."""
FORMAT = 1


def folder_of(backend: TrainingBackend) -> str:
    """The package of a backend, called after it: its `backend.build_backend` builds one (see `trainer.build`), its
    `saved_format.saved_format(model_folder, lora)` and `critic_format(model_folder)` say where its states have what."""
    return f"{__package__}.{backend.value.lower()}"


class SavedFormat(Protocol):
    """Parts of Hugging Face tensors in the states that a backend saved."""

    manifest: Manifest
    """Tensors of a whole checkpoint, without those that are not trained."""
    untrained: tuple[str, ...]
    """Prefixes of their names."""
    lora: LoraSpec | None
    """The adapters that are all that the manifest has; None: it has the model."""

    def pieces_of(self, shard: Mapping[str, Tensor], layout: ParallelLayout) -> list[Piece]:
        """The Hugging Face tensors' parts in what a rank of that layout saved, by parameter.

        Raises:
            ValueError: a parameter that this model does not have, or one of another shape.
        """
        ...

    def may_be_primary(self, at: ParallelLayout) -> bool:
        """Whether pieces of this rank can be primary; the files of others have no weights that are looked for."""
        ...

    def sharers(self, parameter: str, at: ParallelLayout) -> list[int]:
        """Ranks that saved the optimizer's state of a parameter of this rank, from its first part to its last."""
        ...


def backend_of(reader: StateReader) -> TrainingBackend:
    """The backend that saved a file, Megatron where it has no name; ValueError when this version reads none of its."""
    name = reader.metadata.get("backend", TrainingBackend.MEGATRON.value)
    if name not in [backend.value for backend in TrainingBackend]:
        known = ", ".join(TrainingBackend)
        raise ValueError(f"{reader.path}: was saved by the training backend {name!r}; this version reads {known}")
    return TrainingBackend(name)


def saved_format(reader: StateReader, model_folder: Path) -> SavedFormat:
    """The format of a file, for the model of a folder; ValueError when this version does not have it."""
    module = importlib.import_module(f"{folder_of(backend_of(reader))}.saved_format")
    return cast("SavedFormat", module.saved_format(model_folder, saved_adapters(reader)))


def critic_format(reader: StateReader, model_folder: Path) -> SavedFormat:
    """The same of a critic's file, for the critic that begins with a folder."""
    module = importlib.import_module(f"{folder_of(backend_of(reader))}.saved_format")
    return cast("SavedFormat", module.critic_format(model_folder))


def state_metadata(
    backend: TrainingBackend,
    layout: ParallelLayout,
    *,
    updates: int,
    precision: str,
    adapters: Mapping[str, Json] = MappingProxyType({}),
) -> dict[str, Json]:
    """Header of every rank's file; with adapters, their settings and the weights that they belong to."""
    return {
        "format": FORMAT,
        "backend": backend.value,
        "updates": updates,
        "precision": precision,
        "coordinates": dict(layout.coordinates()),
        **adapters,
    }


def adapters_named(lora: LoraSpec) -> dict[str, Json]:
    """Adapters as a file names those that it has."""
    named: dict[str, Json] = lora.model_dump(mode="json", by_alias=True, exclude_none=True)
    return named


def saved_adapters(reader: StateReader) -> LoraSpec | None:
    """The adapters that a file has in the place of weights; None where it has weights."""
    given = reader.metadata.get(LORA)
    return None if given is None else LoraSpec.model_validate(given)


def check_adapters(reader: StateReader, lora: LoraSpec | None) -> None:
    """ValueError when a file has other adapters than a job trains, or only one of the two has any."""
    saved = saved_adapters(reader)
    if saved != lora:
        there, here = ("none" if one is None else str(adapters_named(one)) for one in (saved, lora))
        raise ValueError(
            f"{reader.path}: was saved with other adapters (training.lora: {there} there, {here} here); resume with "
            "those, or export it and start a new job from the export"
        )


def check_precision(reader: StateReader, precision: str) -> None:
    """ValueError when a file was saved in another format or with another precision of training."""
    saved = reader.metadata
    if saved.get("format") != FORMAT:
        raise ValueError(f"{reader.path}: state format {saved.get('format')}, this version reads {FORMAT}")
    if saved["precision"] != precision:
        raise ValueError(
            f"{reader.path}: was saved with another precision (training.precision {saved['precision']} there, "
            f"{precision} here); resume with that, or export it and start a new job from the export"
        )


def layout_of(reader: StateReader) -> ParallelLayout:
    """The layout of the rank that saved a file; ValueError when it has none."""
    return ParallelLayout.of_coordinates(block(reader.metadata.get("coordinates"), f"{reader.path}: coordinates"))


@dataclass(frozen=True, slots=True)
class RankFile:
    """The file of a checkpoint that a rank begins with."""

    reader: StateReader
    updates: int
    resharded: str
    """From which layout to which, where another backend or layout saved it and the rank's parts are in several files;
    empty where neither differs."""


def open_rank_file(
    folder: str,
    backend: TrainingBackend,
    layout: ParallelLayout,
    precision: str,
    lora: LoraSpec | None = None,
    stem: str = POLICY,
) -> RankFile:
    """Open a rank's own file, or rank 0's where a checkpoint of fewer ranks has none.

    Raises:
        ValueError: no file, a damaged one, or one of another precision or rank, or with other adapters.
    """
    own = path_of(folder, layout.rank, stem)
    reader = StateReader(own if own.is_file() else path_of(folder, 0, stem))
    check_precision(reader, precision)
    check_adapters(reader, lora)
    updates = whole(reader.metadata["updates"], f"{reader.path}: updates")
    there = layout_of(reader)
    if backend_of(reader) is not backend or not there.same_cut(layout):
        return RankFile(reader, updates, f"{there.sizes()}, to {layout.sizes()}")
    if there.rank != layout.rank:
        raise ValueError(f"{own}: was saved by rank {there.rank}, or is missing")
    return RankFile(reader, updates, "")


@dataclass(frozen=True, slots=True)
class _Source:
    """Source of a part of a Hugging Face tensor in what was saved."""

    place: TensorSlice
    rank: int
    parameter: str


class SavedState:
    """States that all ranks saved, for a rank of any backend and layout; reads only the parts that it is asked for.

    Args:
        folder: a checkpoint.
        format_of: the format of its files, see `saved_format`.
        stem: of their names.

    Raises:
        ValueError: files are missing, damaged, or of another model; names the file or the tensor.
    """

    def __init__(self, folder: str | Path, format_of: Callable[[StateReader], SavedFormat], stem: str = POLICY) -> None:
        self._folder, self._stem = Path(folder), stem
        self._readers: dict[int, StateReader] = {}
        self._format = format_of(self._reader(0))
        self.layout = layout_of(self._reader(0))
        self._ranks = self.layout.every_rank()
        self._sources: dict[str, list[_Source]] = {}
        for at in self._ranks:
            if self._format.may_be_primary(at):
                self._index(at)
        self._last: tuple[tuple[str, int, str], list[Piece]] | None = None

    @property
    def weights(self) -> str:
        """Kind of the most exact weights that were saved: fp32 master weights, where parameters are apart from them."""
        masters = any(name.startswith(MASTER_PREFIX) for name in self._reader(0).names)
        return MASTER_PREFIX if masters else MODEL_PREFIX

    def fill(self, kind: str, pieces: Sequence[Piece]) -> None:
        """Write what was saved into pieces of the rank that asks; what they do not cover stays as it is.

        Args:
            kind: `model.`, or the prefix of a tensor of the optimizer.
            pieces: bound to what is to be written.
        """
        for piece in pieces:
            piece.write(self._part(kind, piece))

    def updates_of(self, parameter: str, pieces: Sequence[TensorSlice]) -> float:
        """Number of the optimizer's updates of a parameter of the rank that asks, given its pieces."""
        counts = {
            float(reader.read(name))
            for piece in pieces
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
            self._readers[rank] = StateReader(path_of(self._folder, rank, self._stem))
        return self._readers[rank]

    def _index(self, at: ParallelLayout) -> None:
        reader = self._reader(at.rank)
        if layout_of(reader) != at:
            raise ValueError(f"{reader.path}: was saved by {layout_of(reader)}, rank 0 beside it by {self.layout}")
        for name in reader.names:
            if name.startswith(MODEL_PREFIX):
                parameter = name.removeprefix(MODEL_PREFIX)
                shape = torch.empty(reader.shape(name), device="meta")
                for piece in self._format.pieces_of({parameter: shape}, at):
                    if piece.primary:
                        source = _Source(piece.place, at.rank, parameter)
                        self._sources.setdefault(piece.hf_name, []).append(source)

    def _part(self, kind: str, wanted: TensorSlice) -> Tensor:
        whole: Tensor | None = None
        covered = 0
        for source, shared in self._overlapping(wanted):
            part = next(piece for piece in self._saved(kind, source) if piece.place == source.place).read()
            whole = torch.empty(wanted.shape, dtype=part.dtype) if whole is None else whole
            target = whole
            for dim, span in shared.items():
                target = target.narrow(dim, span.start - _span(wanted, dim).start, len(span))
                part = part.narrow(dim, span.start - _span(source.place, dim).start, len(span))
            target.copy_(part)
            covered += part.numel()
        if whole is None or covered != whole.numel():
            raise ValueError(
                f"{self._folder}: {wanted.hf_name}: {covered} of {math.prod(wanted.shape)} elements were saved"
            )
        return whole

    def _overlapping(self, wanted: TensorSlice) -> Iterator[tuple[_Source, dict[int, range]]]:
        """Sources that have something of it, and what of the tensor along each dimension that either is cut along."""
        for source in self._sources.get(wanted.hf_name, []):
            dims = {place.dim for place in (source.place, wanted) if place.dim is not None}
            spans = {dim: (_span(source.place, dim), _span(wanted, dim)) for dim in dims}
            shared = {d: range(max(a.start, b.start), min(a.stop, b.stop)) for d, (a, b) in spans.items()}
            if all(shared.values()):
                yield source, shared

    def _saved(self, kind: str, source: _Source) -> list[Piece]:
        """The Hugging Face tensors in a saved parameter; the last one is kept, for it may hold several."""
        key = (kind, source.rank, source.parameter)
        if self._last is None or self._last[0] != key:
            tensor = self._whole(kind, source)
            pieces = self._format.pieces_of({source.parameter: tensor}, self._ranks[source.rank])
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
        for rank in self._format.sharers(source.parameter, self._ranks[source.rank]):
            reader = self._reader(rank)
            if name in reader.names:
                yield reader, name


def _span(place: TensorSlice, dim: int) -> range:
    if place.dim != dim:
        return range(place.hf_shape[dim])
    return range(place.start, place.start + place.length)
