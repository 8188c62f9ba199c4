"""Syncs between devices that have slots of their own: trainers exchange their pieces, engines check their own copy."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peers import ProcessPeer, broadcast_route
from separate_devices import FILES, SeparateDevice
from sync_cases import KeepingEngine, KeepingEngineOnDevice, TensorPiece, model_weights, pieces_for, plan_for

from rljob_worker.devices.cpu import CpuDevice
from rljob_worker.weightsync.device_ipc import DeviceIpc, Exchange
from rljob_worker.weightsync.engine import WeightSyncEngine
from rljob_worker.weightsync.meeting import HostParties
from rljob_worker.weightsync.plan import Bucket
from rljob_worker.weightsync.route import Route
from rljob_worker.weightsync.routes import HostRoute
from rljob_worker.weightsync.shared_memory import SHARED_MEMORY
from rljob_worker.weightsync.slots import SLOT_COUNT
from rljob_worker.weightsync.trainer import WeightSyncTrainer

SECONDS = 30.0
BUCKET = 6000


class WorkerOnDevice(KeepingEngineOnDevice):
    """`damage` flips a bit of its own slot in a bucket, once."""

    def __init__(self, device: SeparateDevice, damage: int | None) -> None:
        super().__init__(device, self._maybe_damage)
        self._damage = damage

    def _maybe_damage(self, bucket: Bucket, slots: DeviceIpc) -> None:
        if bucket.index == self._damage:
            self._damage = None
            slots.tensor(bucket.index % SLOT_COUNT, bucket.tensors[-1].offset, torch.uint8, (8,))[3] ^= 16


def test_a_device_sums_what_it_rounded_and_not_what_arrived() -> None:
    device = SeparateDevice(0)
    slots = DeviceIpc(device, [torch.zeros(4096, dtype=torch.uint8) for _ in range(SLOT_COUNT)])
    source, target = torch.randn(5, 7).t(), slots.tensor(1, 64, torch.bfloat16, (7, 5))
    assert slots.checksums([slots.filling([(source, target)]).run()]) == [device.checksum(source.bfloat16())]
    assert torch.equal(target, source.bfloat16())


class EngineOverDevices:
    """An engine with a worker on each of some devices."""

    def __init__(self, devices: list[int], damage: int | None) -> None:
        self.workers = [
            WorkerOnDevice(SeparateDevice(index), damage if index == devices[-1] else None) for index in devices
        ]
        for number, worker in enumerate(self.workers):
            worker.number = number
        self._threads = ThreadPoolExecutor(len(devices))

    def __call__(self, method: Callable[..., Any], message: Any, seconds: float) -> list[Any]:
        # Side by side, as vLLM's workers are: over the network they wait for one another.
        return list(self._threads.map(lambda worker: getattr(worker, method.__name__)(message), self.workers))

    def values(self) -> list[list[float]]:
        """Values that each worker holds."""
        return [held(worker) for worker in self.workers]


def held(worker: KeepingEngine) -> list[float]:
    return sorted({float(value) for tensor in worker.weights.values() for value in tensor.unique()})


class BrokenPiece:
    """Cannot be read in one version."""

    def __init__(self, piece: TensorPiece, counter: list[int], version: int) -> None:
        self._piece, self._counter, self._version = piece, counter, version

    def __getattr__(self, name: str) -> Any:
        return getattr(self._piece, name)

    def read(self) -> torch.Tensor:
        if self._counter[0] == self._version:
            raise OSError("the parameter cannot be read")
        return self._piece.read()

    view = read


def trainer(
    pipe: Connection,
    folder: str,
    route: Route,
    rank: int,
    ranks: int,
    engines: int,
    broken_in: int,
    node: list[int] | None = None,
    device: CpuDevice | None = None,
) -> None:
    """A rank that holds its shard of tensors that are all filled with the version."""
    if ranks > 1:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=SECONDS))
    device = device or SeparateDevice(rank)
    weights = model_weights(0)
    plan = plan_for(weights, trainers=ranks, engines=engines, bucket_bytes=BUCKET)
    counter = [0]
    pieces: list[Any] = list(pieces_for(weights, ranks)[rank])
    if rank == ranks - 1:
        pieces[-1] = BrokenPiece(pieces[-1], counter, broken_in)
    exchange = Exchange(device, range(ranks), getattr(device, "staging", _none_of_its_own), node=node)
    sender = WeightSyncTrainer(pieces, plan, trainer=rank, route=route, exchange=exchange)
    pipe.send("up")
    while (command := pipe.recv()) is not None:
        counter[0] = version = command[0]
        for tensor in weights.values():
            tensor.fill_(version)
        if command[1:] == ("die",):
            os._exit(9)
        try:
            report = sender.update_weights(version, SECONDS)
            assert not isinstance(device, SeparateDevice) or device.synchronized >= len(plan.buckets)
            pipe.send(("ok", report["bytes"]))
        except Exception as error:
            pipe.send((type(error).__name__, str(error)))
    sender.close()
    if isinstance(device, SeparateDevice):
        device.remove_files()


def _none_of_its_own(nbytes: int) -> torch.Tensor:
    raise AssertionError("its slots are in host memory")


def engine(pipe: Connection, route: Route, index: int, make: Callable[[], Any]) -> None:
    """One that is made in its process; `values` says what it holds."""
    land = make()
    receiver = WeightSyncEngine(land, route=route, engine=index)
    pipe.send("up")
    while (command := pipe.recv()) is not None:
        try:
            receiver.update_weights(command[0], SECONDS)
            pipe.send(("ok", land.values()))
        except Exception as error:
            assert receiver.version is None
            pipe.send((type(error).__name__, str(error)))
    receiver.close()


@contextmanager
def together(everyone: list[ProcessPeer], ranks: int) -> Iterator[Callable[[int], tuple[list[Any], list[Any]]]]:
    """Yields a function that runs a sync of trainers and the engines after them: what came of it on both sides."""
    try:
        for peer in everyone:
            assert peer.outcome(180) == "up"

        def sync(version: int) -> tuple[list[Any], list[Any]]:
            for peer in everyone:
                peer.start(version)
            outcomes = [peer.outcome(2 * SECONDS) for peer in everyone]
            return outcomes[:ranks], outcomes[ranks:]

        yield sync
    finally:
        for peer in everyone:
            peer.stop()


@contextmanager
def peers(
    ranks: int,
    engines: list[list[int]],
    *,
    damage: int | None = None,
    broken_in: int = -1,
    network: bool = False,
) -> Iterator[Any]:
    """Trainers and engines; yields a function that runs one sync and returns the trainers' and engines' outcomes."""
    with tempfile.TemporaryDirectory(prefix="rljob-test-") as folder:
        route: Route = broadcast_route(workers=len(engines[0])) if network else HostRoute(folder)
        trainers = [ProcessPeer(trainer, folder, route, rank, ranks, len(engines), broken_in) for rank in range(ranks)]
        others = [
            ProcessPeer(engine, route, i, partial(EngineOverDevices, devices, damage))
            for i, devices in enumerate(engines)
        ]
        with together([*trainers, *others], ranks) as sync:
            yield sync


@pytest.mark.parametrize(
    ("ranks", "engines", "network"),
    [
        (1, [[0]], False),
        (2, [[0, 1]], False),
        (4, [[0, 1], [2, 3]], False),
        (2, [[0], [1]], False),
        (1, [[1]], True),
        (2, [[2, 3], [4, 5]], True),
    ],
)
def test_every_device_gets_every_piece(ranks: int, engines: list[list[int]], network: bool) -> None:
    before = set(SHARED_MEMORY.glob(f"{FILES}*"))
    total = sum(tensor.nbytes for tensor in model_weights(0).values())
    with peers(ranks, engines, network=network) as sync:
        for version in (1, 2):
            trainers, landed = sync(version)
            assert [outcome[0] for outcome in trainers] == ["ok"] * ranks, trainers
            assert sum(outcome[1] for outcome in trainers) == total
            assert landed == [("ok", [[float(version)]] * len(devices)) for devices in engines]
    assert set(SHARED_MEMORY.glob(f"{FILES}*")) == before


@pytest.mark.parametrize("network", [False, True])
def test_a_bit_flipped_in_the_copy_of_one_device_fails_the_sync_and_the_next_one_works(network: bool) -> None:
    with peers(2, [[0, 1]], damage=2, network=network) as sync:
        trainers, [failed] = sync(1)
        assert all(kind == "WeightSyncError" and "checksum" in text for kind, text in [*trainers, failed]), trainers
        assert "worker 1" in failed[1]
        assert "bucket 2" in failed[1]
        name = plan_for(model_weights(0), trainers=2, bucket_bytes=BUCKET).buckets[2].tensors[-1].name
        assert name in failed[1]
        trainers, landed = sync(2)
        assert landed == [("ok", [[2.0], [2.0]])], trainers


@pytest.mark.parametrize("network", [False, True])
def test_a_rank_that_cannot_read_a_piece_ends_the_sync_for_all_at_once(network: bool) -> None:
    with peers(2, [[0, 1]], broken_in=1, network=network) as sync:
        trainers, [failed] = sync(1)
        for kind, text in [*trainers, failed]:
            assert kind == "WeightSyncError"
            assert "the parameter cannot be read" in text
        assert "trainer-1" in trainers[0][1]
        trainers, landed = sync(2)
        assert landed == [("ok", [[2.0], [2.0]])], trainers


def test_an_engine_on_a_device_without_trainer_says_so(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"no trainer on this host has device .*:cpu:7"):
        HostParties(tmp_path).find_device(SeparateDevice(7).identity(), 0.0)
