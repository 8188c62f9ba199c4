"""The trainer's end of the weight sync: which pieces this rank sends, agreed with the others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist

from rljob_api import derived
from rljob_api.spec import RLJobSpec
from rljob_worker.devices import Device
from rljob_worker.errors import UserError
from rljob_worker.tensor_slice import TensorSlice
from rljob_worker.trainer.backend import TrainerBackend
from rljob_worker.types import TrainerReport
from rljob_worker.weightsync.device_ipc import Exchange
from rljob_worker.weightsync.plan import HOST_SLICE_BYTES, build_plan
from rljob_worker.weightsync.route import Route
from rljob_worker.weightsync.trainer import WeightSyncTrainer


class WeightSender:
    """This rank's end of the weight sync, made when the first weights go: all ranks are awake then.

    Args:
        backend: has the weights.
        spec: the job.
        device: this rank's.
        route: to the engines; None: nobody takes weights.

    Raises:
        UserError: the route is in place, and cannot serve these weights; names a tensor.
    """

    def __init__(self, backend: TrainerBackend, spec: RLJobSpec, device: Device, route: Route | None) -> None:
        self._backend, self._spec, self._device, self._route = backend, spec, device, route
        self._sync: WeightSyncTrainer | None = None
        if route is not None and route.in_place:
            _check_in_place(backend, spec)

    def send(self, version: int, seconds: float) -> TrainerReport:
        """Hand the weights to this host's engines, or to all, under a version within so many seconds; collective.

        Raises:
            WeightSyncError: it failed on some side; names the party, the version and the bucket.
        """
        if self._sync is None:
            if self._route is None:
                raise RuntimeError("send_weights: this trainer was made without a route to engines")
            self._sync = _weight_sync(self._backend, self._spec, self._device, self._route)
        with self._backend.handing_over() as rounding:
            report = self._sync.update_weights(version, seconds)
        if rounding is not None:
            report |= {"lora_change": rounding.change, "lora_lost": rounding.lost}
        return report

    def take_route(self, route: Route) -> None:
        """Send by another route from now on, to other engines."""
        self.close()
        self._sync, self._route = None, route

    def close(self) -> None:
        """Drop the slots; idempotent."""
        if self._sync is not None:
            self._sync.close()


def _weight_sync(backend: TrainerBackend, spec: RLJobSpec, device: Device, route: Route) -> WeightSyncTrainer:
    """Agree with the ranks of a whole model on the parts that each sends, and make this rank's side of the sync.

    Collective over all ranks, awake. Nodes hold whole copies of the model, each for itself or several between them, and
    a node's trainers send to its engines. Over the network those of the first copies send to all engines.
    """
    per_node = derived.trainers_per_node(spec)
    layout = backend.layout
    # Replicas are counted among the nodes that hold them, so that one replica's pieces there are primary.
    held = backend.pieces(layout.among_replicas(per_node))
    primary = [piece for piece in held if piece.primary]
    mine = [piece.place for piece in primary]
    everyone: list[list[TensorSlice]] = [mine]
    if layout.world_size > 1:
        everyone = [[] for _ in range(layout.world_size)]
        dist.all_gather_object(everyone, mine)
    nodes, count = layout.nodes(per_node), layout.nodes_of_replica(per_node)
    groups = layout.nodes(per_node * count)
    neighbours, node = route.senders(layout.rank, nodes, groups)
    plan = build_plan(
        backend.manifest,
        {trainer: everyone[trainer] for trainer in neighbours},
        dtype=backend.sync_dtype,
        engines=route.engines(derived.engines_per_node(spec)),
        bucket_bytes=spec.weight_sync.bucket_bytes,
        slice_bytes=None if device.own_memory or route.in_place else HOST_SLICE_BYTES,
    )
    exchange = None
    if device.own_memory or count > 1:
        group = _process_group(backend, groups)
        if layout.rank in neighbours:
            exchange = Exchange(device, neighbours, partial(_staging, backend, device), group, node)
    # An engine's device has equal parameters in the place of those that another device's trainer sends.
    pieces = held if route.in_place else primary
    return WeightSyncTrainer(pieces, plan, trainer=layout.rank, route=route, exchange=exchange)


def _check_in_place(backend: TrainerBackend, spec: RLJobSpec) -> None:
    """UserError where engines cannot copy from this rank's parameters."""
    layout, at = backend.layout, "spec.weightSync.transport: InPlace"
    if layout.nodes_of_replica(derived.trainers_per_node(spec)) > 1:
        raise UserError(f"{at}: a copy of the model lies on several nodes; allowed: Auto, or a layout within a node")
    for piece in backend.pieces(layout):
        if piece.view is None:
            wrong = "lies in several places of a parameter, and is put together to be handed over"
        elif (dtype := piece.view().dtype) != backend.sync_dtype:
            wrong = f"is {dtype} in the trainer, and {backend.sync_dtype} in engines"
        else:
            continue
        raise UserError(f"{at}: {piece.hf_name} {wrong}; allowed: Auto")


def _staging(backend: TrainerBackend, device: Device, nbytes: int) -> torch.Tensor:
    with backend.memory.staging() if backend.memory is not None else nullcontext():
        return torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)


def _process_group(backend: TrainerBackend, groups: Sequence[list[int]]) -> dist.ProcessGroup | None:
    """That of this rank and those it holds whole models with, None: the world; collective over all."""
    own = None
    with backend.groups.recording():
        # All ranks make all groups, in the same order.
        for ranks in groups if len(groups) > 1 else ():
            made = dist.new_group(ranks)
            own = made if backend.layout.rank in ranks else own
    return own
