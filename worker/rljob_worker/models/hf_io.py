"""Hugging Face checkpoint folders, streamed in and out one tensor at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rljob_worker.errors import UserError
from rljob_worker.host.files import write_whole, writing
from rljob_worker.models.checkpoint_views import DERIVED
from rljob_worker.models.config import ModelConfig
from rljob_worker.models.facts import PICTURE_FILES
from rljob_worker.models.manifest import CheckpointTensors
from rljob_worker.models.served import architecture_of
from rljob_worker.models.trained import checkpoint_tensors
from rljob_worker.models.weight_files import INDEX_FILE, SINGLE_FILE, names_by_file, tensor_files
from rljob_worker.tensor_slice import Piece

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
}
"""Architectures that Megatron trains; other models are of transformers' class of causal language modelling."""


def load_hf_weights(pieces: Iterable[Piece], folder: str | Path) -> None:
    """Fill the parameters behind `pieces` from a folder's safetensors, reading only this rank's shards.

    Raises:
        UserError: no weights, an unreadable file, or a tensor that is missing, unknown or of the wrong shape; names the
            tensor and the file. Nothing is written when a name or a shape is wrong.
    """
    folder = Path(folder)
    pieces = list(pieces)
    shapes = {piece.hf_name: piece.hf_shape for piece in pieces}
    files = tensor_files(folder)
    cfg = ModelConfig.from_hf(folder)
    tensors = checkpoint_tensors(cfg)
    check_tensor_names(files, tensors, f"{cfg.model_type} model", folder)
    found = tensor_shapes(files)
    for name, shape in shapes.items():
        if found[name] != shape:
            raise UserError(f"{files[name]}: tensor {name} has shape {found[name]}, expected {shape}")
    for head, table in tensors.tied:
        if head in files:
            check_tied_head(files, head, table)
    read_pieces(pieces, files)


def read_pieces(pieces: Iterable[Piece], files: Mapping[str, Path]) -> None:
    """Fill the parameters behind `pieces`, tensor by tensor, reading of the files what each piece has alone."""
    by_file: dict[Path, list[Piece]] = {}
    for piece in pieces:
        by_file.setdefault(files[piece.hf_name], []).append(piece)
    for path, wanted in by_file.items():
        with open_tensors(path) as file:
            for piece in wanted:
                piece.write(_read_shard(file.get_slice(piece.hf_name), piece))


def tensor_shapes(files: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    """Name -> shape, by the files' headers."""
    shapes = {}
    for path, names in names_by_file(files).items():
        with open_tensors(path) as file:
            shapes.update({name: tuple(file.get_slice(name).get_shape()) for name in names})
    return shapes


def untrained_tensors(folder: str | Path, prefixes: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a folder that are no part of the model that is trained, by how their names begin, as they are there.

    Raises:
        UserError: no weights, or an unreadable file.
    """
    files = tensor_files(Path(folder)) if prefixes else {}
    for path, names in names_by_file(files).items():
        with open_tensors(path) as file:
            for name in names:
                if name.startswith(prefixes):
                    yield name, file.get_tensor(name)


class StoredTensor(Protocol):
    """A tensor of an open safetensors file; slicing reads."""

    def __getitem__(self, part: slice | tuple[slice, ...]) -> torch.Tensor: ...

    def get_shape(self) -> list[int]:
        """Shape of the whole."""
        ...

    def get_dtype(self) -> str:
        """By safetensors' name."""
        ...


class TensorFile(Protocol):
    """An open safetensors file."""

    def __enter__(self) -> TensorFile: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def keys(self) -> list[str]:
        """Names of its tensors."""
        ...

    def get_slice(self, name: str) -> StoredTensor:
        """A tensor that is not read yet."""
        ...

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor."""
        ...


def _read_shard(tensor: StoredTensor, piece: Piece) -> torch.Tensor:
    if piece.dim is None:
        return tensor[:]
    span = slice(piece.start, piece.start + piece.length)
    return tensor[(slice(None),) * piece.dim + (span,)]


def open_tensors(path: Path) -> TensorFile:
    """An open safetensors file; UserError where its header does not fit its content."""
    try:
        file: TensorFile = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file: {error}") from error
    return file


def check_tensor_names(files: Mapping[str, Path], tensors: CheckpointTensors, what: str, folder: Path) -> None:
    """UserError when tensors of the model, called so, are missing, or others are there."""
    missing = [name for name, _ in tensors.trained if name not in files]
    allowed = {name for name, _ in (*tensors.trained, *tensors.tied)}
    extra = [
        name
        for name in files
        if name not in allowed and not name.endswith(DERIVED) and not name.startswith(tensors.untrained)
    ]
    problems = [f"tensor {name} is missing" for name in missing[:5]]
    problems += [f"tensor {name} in {files[name].name} is not part of this {what}" for name in extra[:5]]
    unnamed = len(missing) + len(extra) - len(problems)
    if problems:
        raise UserError(f"{folder}: " + "; ".join(problems) + (f"; and {unnamed} more" if unnamed else ""))


def check_tied_head(files: Mapping[str, Path], head: str, table: str) -> None:
    """Some tied checkpoints store the head too; one that differs would be silently dropped."""
    with open_tensors(files[head]) as file, open_tensors(files[table]) as embeddings:
        if not torch.equal(file.get_tensor(head), embeddings.get_tensor(table)):
            raise UserError(
                f"{files[head]}: tensor {head} differs from {table}, but config.json has tie_word_embeddings true"
            )


def save_hf_folder(
    folder: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    hf_config: Mapping[str, object],
    tokenizer_folder: str | Path,
    *,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write a folder that `transformers` and vLLM load: config, tokenizer, and safetensors with an index when several.

    Args:
        folder: created; must not hold weights yet.
        tensors: (HF name, tensor), consumed as a stream; at most `max_file_bytes` are held. The first one's dtype is
            the model's.
        hf_config: `config.json` of the model; dtype and architectures are set from the tensors and the model type.
        tokenizer_folder: where the tokenizer files are copied from.
        max_file_bytes: size of one safetensors file.

    Raises:
        UserError: the folder holds weights already, or tokenizer_folder holds no tokenizer.
    """
    folder, tokenizer_folder = Path(folder), Path(tokenizer_folder)
    folder.mkdir(parents=True, exist_ok=True)
    if next(folder.glob("*.safetensors"), None):
        raise UserError(f"{folder}: holds weights already; choose an empty folder")
    copy_tokenizer(tokenizer_folder, folder)
    writer = _ShardWriter(folder, max_file_bytes)
    for name, tensor in tensors:
        writer.add(name, tensor)
    writer.close()
    config = {key: value for key, value in hf_config.items() if key not in ("torch_dtype", "dtype")}
    kind = str(config["model_type"])
    config.setdefault("architectures", [_ARCHITECTURES.get(kind) or architecture_of(kind)])
    config["dtype"] = str(writer.dtype).removeprefix("torch.")
    if isinstance(language := config.get("text_config"), Mapping):
        config["text_config"] = {**language, "dtype": config["dtype"]}
    _write_json(folder / "config.json", config)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files; UserError when there are none."""
    found = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not any(path.name in ("tokenizer.json", "tokenizer.model", "vocab.json") for path in found):
        raise UserError(f"{source}: no tokenizer; expected tokenizer.json, tokenizer.model or vocab.json")
    _copy(found, folder)


def copy_picture_files(source: Path, folder: Path) -> None:
    """Copy what makes input of pictures, where there is any of it."""
    _copy([source / name for name in PICTURE_FILES if (source / name).is_file()], folder)


def _copy(paths: Iterable[Path], folder: Path) -> None:
    for path in paths:
        if path.parent.resolve() != folder.resolve():
            with writing(folder / path.name, path.stat().st_size):
                shutil.copyfile(path, folder / path.name)


class _ShardWriter:
    """Collects tensors into files of bounded size; names are final only when the number of files is known."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.dtype: torch.dtype | None = None
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._files: list[tuple[Path, list[str]]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self.max_bytes:
            self._flush()
        self.dtype = self.dtype or tensor.dtype
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def _flush(self) -> None:
        path = self.folder / f".part-{len(self._files)}"
        with writing(path, self._pending_bytes):
            save_file(self._pending, path, metadata={"format": "pt"})
        self._files.append((path, list(self._pending)))
        self._pending, self._pending_bytes = {}, 0

    def close(self) -> None:
        if self._pending:
            self._flush()
        if not self._files:
            raise ValueError("a checkpoint needs at least one tensor")
        if len(self._files) == 1:
            self._files[0][0].rename(self.folder / SINGLE_FILE)
            return
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._files, start=1):
            final = f"model-{number:05d}-of-{len(self._files):05d}.safetensors"
            path.rename(self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        _write_json(self.folder / INDEX_FILE, index)


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    write_whole(path, json.dumps(value, indent=2) + "\n", durable=False)
