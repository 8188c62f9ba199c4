"""One rank's saved state: a safetensors file, written without a copy of the tensors and synced to disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rljob_api.json_types import Json
from rljob_worker.host.files import sync_file, sync_folder, writing
from rljob_worker.trainer.checked_file import CheckedFile

POLICY, CRITIC = "rank", "critic"
"""Beginnings of the names of files."""
_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
}


def path_of(folder: str | Path, rank: int, stem: str = POLICY) -> Path:
    """One rank's file of the policy, or of the critic beside it."""
    return Path(folder) / f"{stem}-{rank:05d}.safetensors"


def write_state(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, Json]) -> CheckedFile:
    """Write tensors (of any layout and device, also views of one buffer) and JSON metadata into an existing folder.

    On return the file and its name in the folder are on disk; OSError names the file and its size otherwise. The format
    is safetensors; its own writer refuses tensors that share memory and copies all of them first.
    """
    header: dict[str, Json] = {"__metadata__": {key: json.dumps(value) for key, value in metadata.items()}}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    digest = xxhash.xxh3_64()
    with writing(path, 8 + len(head) + offset), open(path, "wb") as file:
        parts: Iterator[bytes | memoryview] = chain(
            (len(head).to_bytes(8, "little"), head), map(_bytes_of, tensors.values())
        )
        for part in parts:
            digest.update(part)
            file.write(part)
        sync_file(file)
    sync_folder(path.parent)
    return CheckedFile(path.name, 8 + len(head) + offset, digest.hexdigest())


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class StateReader:
    """Reads a saved state tensor by tensor.

    Raises:
        ValueError: the file is missing, damaged or lacks a tensor; names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ValueError(f"{path}: no such file; the checkpoint has no state for this rank")
        try:
            self._file = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: not a readable state file: {error}") from error
        self.metadata: dict[str, object] = {
            key: json.loads(text) for key, text in (self._file.metadata() or {}).items()
        }
        self.names: set[str] = set(self._file.keys())

    def read_into(self, name: str, target: Tensor) -> None:
        """Copy a tensor into `target`, which must have its shape and dtype."""
        value = self.read(name)
        if value.shape != target.shape or value.dtype != target.dtype:
            raise ValueError(
                f"{self.path}: {name} is {value.dtype} {tuple(value.shape)}, "
                f"this job has {target.dtype} {tuple(target.shape)}"
            )
        with torch.no_grad():
            target.copy_(value)

    def read(self, name: str) -> Tensor:
        """A tensor of the file."""
        self._require(name)
        return self._file.get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor of the file, which is not read."""
        self._require(name)
        return tuple(self._file.get_slice(name).get_shape())

    def _require(self, name: str) -> None:
        if name not in self.names:
            raise ValueError(f"{self.path}: has no tensor {name}")
