"""Syncs of a model whose pieces lie on several nodes: each node's engines get all of them, with their writers' word."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from peers import ProcessPeer, broadcast_route
from separate_devices import SeparateDevice
from sync_cases import KeepingEngine, model_weights, plan_for
from test_device_sync import BUCKET, EngineOverDevices, engine, held, together, trainer

from rljob_worker.devices.cpu import CpuDevice
from rljob_worker.weightsync.plan import Bucket
from rljob_worker.weightsync.route import Route
from rljob_worker.weightsync.routes import HostRoute

Outcomes = tuple[list[Any], list[Any]]
NODES = [[0, 1], [2, 3]]
"""Ranks that hold a model between them, each tensor in four pieces."""
RANKS = 4


class HostEngine(KeepingEngine):
    """Takes weights from its host's memory; `damage` flips a bit there in a bucket, once."""

    def __init__(self, damage: int | None) -> None:
        super().__init__(self._maybe_damage)
        self._damage = damage

    def _maybe_damage(self, bucket: Bucket, slots: Any) -> None:
        if bucket.index == self._damage:
            self._damage = None
            slots.bytes_of(bucket.index % 2)[bucket.tensors[-1].offset + 3] ^= 16

    def values(self) -> list[list[float]]:
        return [held(self)]


@contextmanager
def peers(
    *, devices: bool, network: bool, broken_in: int = -1, damage: int | None = None
) -> Iterator[Callable[[int], Outcomes]]:
    """Trainers of two nodes, and an engine on each; with `network` they are on nodes of their own."""
    with tempfile.TemporaryDirectory(prefix="rljob-test-") as one, tempfile.TemporaryDirectory() as other:
        routes: list[Route] = [HostRoute(one), HostRoute(other)]
        if network:
            first = broadcast_route()
            routes = [first, first.at("127.0.0.3")]
        everyone = []
        for number, node in enumerate(NODES):
            route, reach = (routes[0], NODES[0]) if network else (routes[number], node)
            for rank in node:
                device = SeparateDevice(rank) if devices else CpuDevice(rank)
                engines = 2 if network else 1
                peer = ProcessPeer(trainer, one, route, rank, RANKS, engines, broken_in, reach, device)
                everyone.append(peer)
        for number, route in enumerate(routes):
            own = [RANKS + number] if network else NODES[number][:1]
            last = damage if number == 1 else None
            make = partial(EngineOverDevices, own, last) if devices else partial(HostEngine, last)
            everyone.append(ProcessPeer(engine, route, number if network else 0, make))
        with together(everyone, RANKS) as sync:
            yield sync


@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize("devices", [False, True])
def test_every_node_gets_every_piece(devices: bool, network: bool) -> None:
    total = sum(tensor.nbytes for tensor in model_weights(0).values())
    with peers(devices=devices, network=network) as sync:
        for version in (1, 2):
            trainers, landed = sync(version)
            assert [outcome[0] for outcome in trainers] == ["ok"] * RANKS, trainers
            assert sum(outcome[1] for outcome in trainers) == total, "each piece was read once"
            assert landed == [("ok", [[float(version)]])] * 2


@pytest.mark.parametrize("devices", [False, True])
def test_a_bit_flipped_on_one_node_fails_the_sync_on_both_and_the_next_one_works(devices: bool) -> None:
    with peers(devices=devices, network=False, damage=2) as sync:
        trainers, engines = sync(1)
        assert {kind for kind, _ in [*trainers, *engines]} == {"WeightSyncError"}
        assert all("bucket 2" in text and "checksum" in text for _, text in [*trainers, *engines]), trainers
        name = plan_for(model_weights(0), trainers=RANKS, bucket_bytes=BUCKET).buckets[2].tensors[-1].name
        assert all(name in text for _, text in [*trainers, *engines]), trainers
        trainers, landed = sync(2)
        assert landed == [("ok", [[2.0]])] * 2, trainers


@pytest.mark.parametrize("network", [False, True])
def test_a_rank_elsewhere_that_cannot_read_a_piece_ends_the_sync_for_all(network: bool) -> None:
    with peers(devices=False, network=network, broken_in=1) as sync:
        trainers, engines = sync(1)
        for kind, text in [*trainers, *engines]:
            assert kind == "WeightSyncError"
            assert "the parameter cannot be read" in text
        assert all("trainer-3" in text for _, text in trainers[:3])
        trainers, landed = sync(2)
        assert landed == [("ok", [[2.0]])] * 2, trainers
