"""Small models as plain tensors, cut into pieces for several trainers, and an engine that keeps what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rljob_worker.devices import Device
from rljob_worker.weightsync import rendezvous
from rljob_worker.weightsync.device_slots import DeviceSlots
from rljob_worker.weightsync.plan import PieceGeometry, PlacedPiece, SyncPlan, build_plan, dtype_named
from rljob_worker.weightsync.slots import Slots
from rljob_worker.weightsync.staging import Staging

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A piece of a tensor held in memory."""

    hf_name: str
    hf_shape: tuple[int, ...]
    dim: int | None
    start: int
    length: int
    whole: torch.Tensor

    def read(self) -> torch.Tensor:
        return self.whole if self.dim is None else self.whole.narrow(self.dim, self.start, self.length)


def model_weights(seed: int, *, layers: int = 2, hidden: int = 32, dtype: torch.dtype = torch.bfloat16) -> Weights:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (48, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + "input_layernorm.weight": (hidden,)}
        shapes |= {f"{prefix}self_attn.{p}_proj.weight": (hidden, hidden) for p in "qkvo"}
        shapes |= {f"{prefix}mlp.{p}_proj.weight": (2 * hidden, hidden) for p in ("gate", "up")}
        shapes |= {prefix + "mlp.down_proj.weight": (hidden, 2 * hidden)}
    shapes["lm_head.weight"] = (48, hidden)
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def cut_dim(name: str) -> int:
    return 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0


def pieces_for(weights: Mapping[str, torch.Tensor], producers: int) -> dict[int, list[TensorPiece]]:
    """Cut as tensor parallelism does: matrices in shards, vectors on every rank."""
    pieces: dict[int, list[TensorPiece]] = {rank: [] for rank in range(producers)}
    for name, tensor in weights.items():
        shape, dim = tuple(tensor.shape), cut_dim(name)
        for rank in range(producers):
            if tensor.dim() == 1 or producers == 1:
                pieces[rank].append(TensorPiece(name, shape, None, 0, shape[0], tensor))
                continue
            start, end = (shape[dim] * edge // producers for edge in (rank, rank + 1))
            pieces[rank].append(TensorPiece(name, shape, dim, start, end - start, tensor))
    return pieces


def plan_for(weights: Weights, *, producers: int = 1, consumers: int = 1, bucket_bytes: int = 8192) -> SyncPlan:
    pieces = pieces_for(weights, producers)
    geometries = {rank: [PieceGeometry.of(piece) for piece in held] for rank, held in pieces.items()}
    dtype = next(iter(weights.values())).dtype
    manifest = [(name, tuple(tensor.shape)) for name, tensor in weights.items()]
    return build_plan(manifest, geometries, dtype=dtype, consumers=consumers, bucket_bytes=bucket_bytes)


class KeepingEngine:
    """Answers the calls that a vLLM worker answers, copying what it is given into `weights`."""

    def __init__(self, before_landing: Callable[[dict[str, Any], Any], None] | None = None) -> None:
        self.weights: Weights = {}
        self.finished_version: int | None = None
        self._slots: Staging | None = None
        self._before_landing = before_landing or (lambda message, slots: None)

    def __call__(self, method: str, message: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        assert seconds > 0
        return [getattr(self, method)(message)]

    def _attached(self, message: dict[str, Any]) -> Staging:
        return Slots.attach(message["slots"], message["slot_bytes"])

    def rljob_begin_sync(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._slots is None:
            self._slots = self._attached(message)
        self._dtype = dtype_named(message["dtype"])
        self._landing: Weights = {}
        return {"begin_seconds": 0.0}

    def rljob_land_bucket(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._slots is not None
        self._before_landing(message, self._slots)
        sums = []
        for tensor in message["tensors"]:
            weight = self._slots.tensor(message["slot"], tensor["offset"], self._dtype, tuple(tensor["shape"]))
            sums.append([self._slots.checksum(PlacedPiece(**piece).part_of(weight)) for piece in tensor["pieces"]])
            self._landing[tensor["name"]] = weight.clone()
        names = [tensor["name"] for tensor in message["tensors"]]
        return {"names": names, "checksums": sums, "checksum_seconds": 0.0, "load_seconds": 0.0, "repack_seconds": 0.0}

    def rljob_finish_sync(self, message: dict[str, Any]) -> dict[str, Any]:
        self.weights, self.finished_version = self._landing, message["version"]
        return {"version": message["version"], "tensors": len(self._landing), "finish_seconds": 0.0}

    def close(self) -> None:
        if self._slots is not None:
            self._slots.close()


class KeepingEngineOnDevice(KeepingEngine):
    """One worker of an engine on a device that has slots of its own, which the trainer there shares."""

    def __init__(
        self, device: Device, seconds: float, before_landing: Callable[[dict[str, Any], Any], None] | None = None
    ) -> None:
        super().__init__(before_landing)
        self.device, self._seconds = device, seconds

    def _attached(self, message: dict[str, Any]) -> Staging:
        handles = rendezvous.find_device(message["folder"], self.device.identity(), self._seconds)
        return DeviceSlots.open(self.device, handles, message["slot_bytes"])


def own_mappings(fragment: str) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if fragment in line]
