"""A tensor's device memory in another process: torch's own export and import, as a message of plain values.

`torch.multiprocessing.reductions` and torch_npu's replacement of it describe an exported tensor by the same 15 values.
Only what the importer cannot know travels. The device's number does not: the importer may count its devices in another
way, and takes its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
import torch.multiprocessing.reductions as reductions

_FIELDS = (
    "tensor class",
    "size",
    "stride",
    "offset",
    "storage class",
    "dtype",
    "device",
    "handle",
    "storage bytes",
    "storage offset",
    "requires grad",
    "counter handle",
    "counter offset",
    "event handle",
    "event sync",
)
"""The 15 values by position."""
_OURS = ("tensor class", "storage class", "device", "requires grad")
"""The importer fills these in itself."""


def export_tensor(tensor: torch.Tensor, rebuild: Callable[..., torch.Tensor], device: str) -> bytes:
    """Message from which a process on the same device opens the tensor's memory. The tensor must outlive its users.

    Args:
        tensor: on a device.
        rebuild: the function that torch names for its import.
        device: identity of the device.

    Raises:
        RuntimeError: the driver cannot export this memory, or torch describes it in a way that is not known here.
    """
    try:
        made, values = reductions.reduce_tensor(tensor.detach())
    except RuntimeError as error:
        raise RuntimeError(
            f"share: this tensor's memory cannot be exported ({error}); memory of the memory saver never can: allocate "
            "what is shared inside the memory saver's staging()"
        ) from error
    if made is not rebuild or len(values) != len(_FIELDS):
        raise RuntimeError(
            f"share: torch exports a {tensor.device.type} tensor as {made.__name__} with {len(values)} values; known "
            f"here is {rebuild.__name__} with {len(_FIELDS)}"
        )
    fields = dict(zip(_FIELDS, values, strict=True))
    sent = {name: _plain(value) for name, value in fields.items() if name not in _OURS}
    return json.dumps({"on": device, **sent}).encode()


def import_tensor(
    message: bytes, rebuild: Callable[..., torch.Tensor], device: str, logical_index: int
) -> torch.Tensor:
    """The exported tensor's memory; ValueError when it is another device's.

    Args:
        message: from `export_tensor`.
        rebuild: torch's function for the import.
        device: identity of the importer's device.
        logical_index: its number in the importer's process.
    """
    fields: dict[str, object] = json.loads(message)
    origin = fields.pop("on")
    if origin != device:
        raise ValueError(f"open_shared: the memory is on {origin}, this process uses {device}; they must be the same")
    values = {name: _value(name, value) for name, value in fields.items()}
    values |= {
        "tensor class": torch.Tensor,
        "storage class": torch.storage.TypedStorage,
        "device": logical_index,
        "requires grad": False,
    }
    return rebuild(*(values[name] for name in _FIELDS))


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, (tuple, list)):
        return [int(item) for item in value]
    return value


def _value(name: str, value: object) -> object:
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    if name == "dtype":
        return getattr(torch, str(value))
    if isinstance(value, list):
        return torch.Size(value) if name == "size" else tuple(value)
    return value
