"""Small models as plain tensors, cut into pieces for several trainers, and an engine that keeps what it is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rljob_worker.devices import Device
from rljob_worker.devices.cpu import CpuDevice
from rljob_worker.memory.sleeping import shareable
from rljob_worker.tensor_slice import TensorSlice
from rljob_worker.weightsync.plan import Bucket, SyncPlan, build_plan
from rljob_worker.weightsync.route import Receiver
from rljob_worker.weightsync.routes import route_from
from rljob_worker.weightsync.slots import Move

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class TensorPiece(TensorSlice):
    """A piece of a tensor held in memory."""

    whole: torch.Tensor

    def read(self) -> torch.Tensor:
        return self.whole if self.dim is None else self.whole.narrow(self.dim, self.start, self.length)

    def view(self) -> torch.Tensor:
        return self.read()

    def address(self) -> int:
        return self.whole.data_ptr()


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


def in_shared_pages(weights: Weights) -> Weights:
    """The same values in memory that other processes can open."""
    with shareable(CpuDevice(), None):
        return {name: tensor.clone() for name, tensor in weights.items()}


def cut_dim(name: str) -> int:
    return 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0


def pieces_for(weights: Mapping[str, torch.Tensor], trainers: int) -> dict[int, list[TensorPiece]]:
    """Cut as tensor parallelism does: matrices in shards, vectors on every rank."""
    pieces: dict[int, list[TensorPiece]] = {rank: [] for rank in range(trainers)}
    for name, tensor in weights.items():
        shape, dim = tuple(tensor.shape), cut_dim(name)
        for rank in range(trainers):
            if tensor.dim() == 1 or trainers == 1:
                pieces[rank].append(TensorPiece(name, shape, None, 0, shape[0], tensor))
                continue
            start, end = (shape[dim] * edge // trainers for edge in (rank, rank + 1))
            pieces[rank].append(TensorPiece(name, shape, dim, start, end - start, tensor))
    return pieces


def plan_for(
    weights: Weights,
    *,
    trainers: int = 1,
    engines: int = 1,
    bucket_bytes: int = 8192,
    slice_bytes: int | None = None,
    pieces: Mapping[int, Sequence[TensorSlice]] | None = None,
) -> SyncPlan:
    pieces = pieces_for(weights, trainers) if pieces is None else pieces
    geometries = {rank: [piece.place for piece in held] for rank, held in pieces.items()}
    dtype = next(iter(weights.values())).dtype
    manifest = [(name, tuple(tensor.shape)) for name, tensor in weights.items()]
    return build_plan(
        manifest, geometries, dtype=dtype, engines=engines, bucket_bytes=bucket_bytes, slice_bytes=slice_bytes
    )


class KeepingEngine:
    """Answers the calls that a vLLM worker answers, copying what it is given into `weights`."""

    device: Device = CpuDevice()

    def __init__(self, before_landing: Callable[[Bucket, Any], None] | None = None) -> None:
        self.weights: Weights = {}
        self.finished_version: int | None = None
        self._receiver: Receiver | None = None
        self._before_landing = before_landing or (lambda bucket, slots: None)
        self.number = 0
        """Number of this worker in its engine."""

    def __call__(self, method: Callable[..., Any], message: Any, seconds: float) -> list[Any]:
        assert seconds > 0
        return [getattr(self, method.__name__)(message)]

    def deadline(self, message: dict[str, Any]) -> float:
        """Latest end of a call."""
        return time.monotonic() + float(message["seconds"])

    def rljob_begin_sync(self, message: dict[str, Any]) -> dict[str, Any]:
        route = route_from(message["route"])
        if self._receiver is None:
            self._receiver = route.make_receiver(
                self.device, message["slots"], message["slot_bytes"], self.deadline(message)
            )
        self._plan, _ = route.parties().find(self.deadline(message))
        self._landing: Weights = {}
        return {"seconds": {"begin": 0.0}}

    def rljob_join_route(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._receiver is not None
        engine, version, anew = message["engine"], message["version"], message["anew"]
        self._receiver.join(self._plan, engine, self.number, version, anew, self.deadline(message))
        return {"seconds": {"begin": 0.0}}

    def rljob_land_bucket(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._receiver is not None
        bucket, slots = self._plan.buckets[message["bucket"]], self._receiver.slots
        self._receiver.receive(bucket)
        if bucket is not self._plan.buckets[-1]:
            self._receiver.expect(self._plan.buckets[bucket.index + 1])
        self._before_landing(bucket, slots)
        for tensor in bucket.tensors:
            weight = self._receiver.arrived.whole(bucket, tensor, self._plan.torch_dtype)
            landed = self._landing.get(tensor.name, weight[:0])
            assert tensor.first == len(landed)
            self._landing[tensor.name] = torch.cat([landed, weight])
        digests = [self._digest(bucket, slots, group.pieces) for group in self._plan.groups[bucket.index]]
        everything = [[(tensor, piece)] for tensor in bucket.tensors for piece in tensor.pieces]
        return {
            "names": [tensor.name for tensor in bucket.tensors],
            "digests": digests,
            "untaken": [],
            "checksums": [self._digest(bucket, slots, one) for one in everything],
            "seconds": {"land": 0.0, "repack": 0.0},
        }

    def _digest(self, bucket: Bucket, slots: Any, placed: Any) -> int:
        assert self._receiver is not None
        moves = []
        for tensor, piece in placed:
            pieces = self._receiver.arrived.pieces(bucket, tensor, self._plan.torch_dtype)
            moves.append(Move(None, None, pieces[tensor.pieces.index(piece)]))
        [digest] = slots.checksums([slots.landing(moves).run()])
        return int(digest)

    def rljob_finish_sync(self, message: dict[str, Any]) -> dict[str, Any]:
        self.weights, self.finished_version = self._landing, message["version"]
        return {"version": message["version"], "tensors": len(self._landing), "seconds": {"finish": 0.0}}

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()


class KeepingEngineOnDevice(KeepingEngine):
    """One worker of an engine on a device that has slots of its own, which the trainer there shares."""

    def __init__(self, device: Device, before_landing: Callable[[Bucket, Any], None] | None = None) -> None:
        super().__init__(before_landing)
        self.device = device


def own_mappings(fragment: str) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if fragment in line]
