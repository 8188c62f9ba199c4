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
from rljob_worker.tensor_slice import TensorSlice
from rljob_worker.weightsync.carriers import Carrier, join_carrier
from rljob_worker.weightsync.device_ipc import DeviceIpc
from rljob_worker.weightsync.meeting import HostParties, NetworkParties, Parties, meeting_from
from rljob_worker.weightsync.plan import Bucket, SyncPlan, build_plan
from rljob_worker.weightsync.shared_memory import HostMemory, SharedMemory
from rljob_worker.weightsync.transport import SLOT_COUNT, Transport

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class TensorPiece(TensorSlice):
    """A piece of a tensor held in memory."""

    whole: torch.Tensor

    def read(self) -> torch.Tensor:
        return self.whole if self.dim is None else self.whole.narrow(self.dim, self.start, self.length)

    def view(self) -> torch.Tensor:
        return self.read()


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
        self._slots: Transport | None = None
        self._before_landing = before_landing or (lambda bucket, slots: None)
        self.number = 0
        """Of this worker in its engine."""
        self._parties: Parties | None = None
        self._carrier: Carrier | None = None

    def __call__(self, method: Callable[..., Any], message: Any, seconds: float) -> list[Any]:
        assert seconds > 0
        return [getattr(self, method.__name__)(message)]

    def _attached(self, message: dict[str, Any], parties: Parties) -> Transport:
        if isinstance(parties, NetworkParties):
            return HostMemory.private(message["slot_bytes"])
        return SharedMemory.attach(message["slots"], message["slot_bytes"])

    def rljob_begin_sync(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._parties is None:
            self._parties = meeting_from(message["meeting"]).parties()
        if self._slots is None:
            self._slots = self._attached(message, self._parties)
        self._plan, _ = self._parties.find(time.monotonic() + message["seconds"])
        self._landing: Weights = {}
        return {"seconds": {"begin": 0.0}}

    def rljob_join_carrier(self, message: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(self._parties, NetworkParties)
        assert self._slots is not None
        if self._carrier is not None and (message["anew"] or not self._carrier.serves(message["version"])):
            self._carrier.close()
            self._carrier = None
        if self._carrier is None:
            deadline = time.monotonic() + message["seconds"]
            engines, member = self._plan.engines, message["first_member"] + self.number
            self._carrier = join_carrier(
                self.device, self._parties, engines, member, self._slots, message["version"], deadline
            )
        assert self._carrier is not None
        self._carrier.expect(self._plan.buckets[0])
        return {"seconds": {"begin": 0.0}}

    def rljob_land_bucket(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._slots is not None
        bucket = self._plan.buckets[message["bucket"]]
        if self._carrier is not None:
            self._carrier.receive(bucket)
            if bucket is not self._plan.buckets[-1]:
                self._carrier.expect(self._plan.buckets[bucket.index + 1])
        self._before_landing(bucket, self._slots)
        sums = []
        for tensor in bucket.tensors:
            weight = self._slots.tensor(bucket.index % SLOT_COUNT, tensor.offset, self._plan.torch_dtype, tensor.shape)
            sums.append(self._slots.checksums([self._slots.checksum(piece.part.of(weight)) for piece in tensor.pieces]))
            landed = self._landing.get(tensor.name, weight[:0])
            assert tensor.first == len(landed)
            self._landing[tensor.name] = torch.cat([landed, weight])
        names = [tensor.name for tensor in bucket.tensors]
        return {"names": names, "checksums": sums, "seconds": {"land": 0.0, "repack": 0.0}}

    def rljob_finish_sync(self, message: dict[str, Any]) -> dict[str, Any]:
        self.weights, self.finished_version = self._landing, message["version"]
        return {"version": message["version"], "tensors": len(self._landing), "seconds": {"finish": 0.0}}

    def close(self) -> None:
        if self._slots is not None:
            self._slots.close()


class KeepingEngineOnDevice(KeepingEngine):
    """One worker of an engine on a device that has slots of its own, which the trainer there shares."""

    def __init__(
        self, device: Device, seconds: float, before_landing: Callable[[Bucket, Any], None] | None = None
    ) -> None:
        super().__init__(before_landing)
        self.device, self._seconds = device, seconds

    def own_slots(self, nbytes: int) -> list[torch.Tensor]:
        """Memory of the device that this process makes."""
        return [torch.empty(nbytes, dtype=torch.uint8, device=self.device.torch_device) for _ in range(SLOT_COUNT)]

    def _attached(self, message: dict[str, Any], parties: Parties) -> Transport:
        if isinstance(parties, NetworkParties):
            return DeviceIpc(self.device, self.own_slots(message["slot_bytes"]))
        assert isinstance(parties, HostParties)
        handles = parties.find_device(self.device.identity(), self._seconds)
        return DeviceIpc.open(self.device, handles, message["slot_bytes"])


def own_mappings(fragment: str) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if fragment in line]
