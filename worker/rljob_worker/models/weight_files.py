"""Files of a model folder and their safetensors tensors, by the files' headers; torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rljob_worker.errors import UserError
from rljob_worker.models.json_files import read_json_object

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_LONGEST_NAME = 255
"""Bytes of a file's name, on any usual file system."""


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it.

    Raises:
        UserError: there are none, a file cannot be read or is not whole, or the index does not fit the files.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            weight_map = read_json_object(index)["weight_map"]
        except KeyError:
            raise UserError(f"{index}: not a safetensors index: it has no weight_map") from None
        except UserError as error:
            raise UserError(f"{error}; it is not a safetensors index") from None
        if not isinstance(weight_map, dict) or not all(_is_file_name(name) for name in weight_map.values()):
            raise UserError(f"{index}: weight_map must map tensors to names of files beside it")
        paths = sorted({folder / name for name in weight_map.values()})
        listed = {name: folder / file for name, file in weight_map.items()}
    else:
        paths = sorted(folder.glob("*.safetensors"))
        listed = None
    if not paths:
        raise UserError(f"{folder}: no weights; expected {SINGLE_FILE}, or {INDEX_FILE} with the files it lists")
    files: dict[str, Path] = {}
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: no such file, but {INDEX_FILE} lists it")
        for name in _names_in(path):
            if name in files:
                raise UserError(f"{path}: tensor {name} is in {files[name].name} as well")
            files[name] = path
    for name, path in (listed or {}).items():
        if files.get(name) != path:
            raise UserError(f"{path}: tensor {name} is missing, but {INDEX_FILE} lists it there")
    return files


def files_there(folder: Path) -> dict[str, Path]:
    """The same; empty where the folder has no weights (yet)."""
    return tensor_files(folder) if next(folder.glob("*.safetensors"), None) else {}


def names_by_file(files: Mapping[str, Path]) -> dict[Path, list[str]]:
    """File -> the tensors in it."""
    names: dict[Path, list[str]] = {}
    for name, path in files.items():
        names.setdefault(path, []).append(name)
    return names


def _is_file_name(name: object) -> bool:
    if not isinstance(name, str) or not name.isprintable() or len(name.encode()) > _LONGEST_NAME:
        return False
    return name == Path(name).name and name.endswith(".safetensors")


def _names_in(path: Path) -> list[str]:
    """Names of a file's tensors; its header is held against its size."""
    try:
        with safe_open(path, framework="np") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file: {error}") from error
