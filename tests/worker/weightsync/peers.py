"""Senders and receivers that run side by side: threads of this process, or processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from support.ports import free_port
from sync_cases import KeepingEngine, Weights, in_shared_pages, model_weights, own_mappings, pieces_for, plan_for

from rljob_worker.weightsync.engine import WeightSyncEngine
from rljob_worker.weightsync.meeting import NetworkMeeting
from rljob_worker.weightsync.plan import Bucket
from rljob_worker.weightsync.route import Route
from rljob_worker.weightsync.routes import BroadcastRoute, DiskRoute, HostRoute, InPlaceRoute
from rljob_worker.weightsync.trainer import WeightSyncTrainer


@dataclass
class Peers:
    """Threads: cheap, and faults can be put in anywhere."""

    folder: str
    weights: Weights
    senders: list[WeightSyncTrainer]
    engines: list[KeepingEngine]
    receivers: list[WeightSyncEngine]
    outcomes: dict[str, Any] = field(default_factory=dict)

    def sync(self, version: int, *, deadline: float = 20.0, without: tuple[str, ...] = ()) -> dict[str, Any]:
        """Result or error of each peer."""
        self.outcomes = {}
        calls = {f"trainer-{i}": sender.update_weights for i, sender in enumerate(self.senders)}
        calls |= {f"engine-{i}": receiver.update_weights for i, receiver in enumerate(self.receivers)}
        threads = [
            threading.Thread(target=self._run, args=(name, call, version, deadline))
            for name, call in calls.items()
            if name not in without
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(deadline + 20)
            assert not thread.is_alive()
        return self.outcomes

    def _run(self, name: str, call: Any, version: int, deadline: float) -> None:
        try:
            self.outcomes[name] = call(version, deadline)
        except Exception as error:
            self.outcomes[name] = error

    def sync_without_growth(self, versions: int) -> None:
        """Hand over so many versions in turn; from the tenth on the process holds no more than it did then.

        Files by rate: what tests before left running in this process opens and closes some of its own meanwhile.
        """
        sizes = []
        for version in range(1, versions + 1):
            self.weights["lm_head.weight"].fill_(version)
            self.sync(version)
            assert self.receivers[0].version == version
            assert self.landed_right()
            if version >= 10:
                sizes.append((len(os.listdir("/proc/self/fd")), len(own_mappings("rljob-"))))
        files, mappings = zip(*sizes)
        assert files[-1] - files[0] < len(files) // 4, sizes
        assert len(set(mappings)) == 1, sizes

    def landed_right(self) -> bool:
        return all(
            list(engine.weights) == list(self.weights)
            and all(torch.equal(engine.weights[name], tensor) for name, tensor in self.weights.items())
            for engine in self.engines
        )


@contextmanager
def threaded_peers(
    trainers: int,
    engines: list[KeepingEngine],
    weights: Weights | None = None,
    slice_bytes: int | None = None,
    pieces: Mapping[int, Sequence[Any]] | None = None,
    *,
    network: bool = False,
    disk: bool = False,
    in_place: bool = False,
) -> Iterator[Peers]:
    """With `network`, trainers and each engine have an address of their own; with `disk`, a folder for buckets too."""
    weights = model_weights(1) if weights is None else weights
    if in_place and pieces is None:
        weights = in_shared_pages(weights)
    pieces = pieces_for(weights, trainers) if pieces is None else pieces
    plan = plan_for(weights, engines=len(engines), bucket_bytes=6000, slice_bytes=slice_bytes, pieces=pieces)
    with tempfile.TemporaryDirectory(prefix="rljob-test-") as folder:
        route: Route = InPlaceRoute(folder) if in_place else HostRoute(folder)
        routes = [route] * len(engines)
        if network or disk:
            route = over = DiskRoute(network_meeting(), f"{folder}/buckets") if disk else broadcast_route()
            routes = [over.at(f"127.0.0.{3 + number}") for number in range(len(engines))]
        senders = [WeightSyncTrainer(pieces[rank], plan, trainer=rank, route=route) for rank in range(trainers)]
        receivers = [
            WeightSyncEngine(engine, route=own, engine=number)
            for number, (engine, own) in enumerate(zip(engines, routes, strict=True))
        ]
        try:
            yield Peers(folder, weights, senders, engines, receivers)
        finally:
            for peer in (*receivers, *engines, *senders):
                peer.close()


def network_meeting(workers: int = 1, seconds: float = 20.0) -> NetworkMeeting:
    """Trainers at an address of the loopback network."""
    host = "127.0.0.2"
    # How many engines there are, the plan says here.
    return NetworkMeeting(host, free_port(host), host, "the job's secret", engines=1, workers=workers, seconds=seconds)


def broadcast_route(workers: int = 1, seconds: float = 20.0) -> BroadcastRoute:
    """From trainers at an address of the loopback network."""
    return BroadcastRoute(network_meeting(workers, seconds))


class ProcessPeer:
    """A peer in a process of its own, which gets its commands over a pipe."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        # Forked from a server that has imported everything once; only the first start takes seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["rljob_worker.weightsync.engine", "rljob_worker.weightsync.trainer"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, *command: Any) -> None:
        self.pipe.send(command)

    def outcome(self, seconds: float) -> Any:
        if not self.pipe.poll(seconds):
            raise TimeoutError(f"no answer within {seconds} s")
        return self.pipe.recv()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(60)

    def stop(self) -> None:
        if self.process.is_alive():
            self.pipe.send(None)
            self.process.join(20)
        if self.process.is_alive():
            self.kill()


def _serve(pipe: Connection, peer: Any, method: Any, describe: Any) -> None:
    pipe.send("up")
    while (command := pipe.recv()) is not None:
        try:
            method(*command)
            pipe.send(("ok", describe()))
        except Exception as error:
            pipe.send((type(error).__name__, str(error)))
    peer.close()


def sender_process(pipe: Connection, route: Route, rank: int, trainers: int, engines: int) -> None:
    weights = in_shared_pages(model_weights(0)) if route.in_place else model_weights(0)
    plan = plan_for(weights, trainers=trainers, engines=engines, bucket_bytes=6000)
    sender = WeightSyncTrainer(pieces_for(weights, trainers)[rank], plan, trainer=rank, route=route)

    def send(version: int, deadline: float) -> None:
        for tensor in weights.values():
            tensor.fill_(version)
        sender.update_weights(version, deadline)

    _serve(pipe, sender, send, lambda: None)


def receiver_process(pipe: Connection, route: Route, index: int, die_in_bucket: int | None = None) -> None:
    def before_landing(bucket: Bucket, slots: Any) -> None:
        if bucket.index == die_in_bucket:
            os.kill(os.getpid(), signal.SIGKILL)

    engine = KeepingEngine(before_landing)
    receiver = WeightSyncEngine(engine, route=route, engine=index)
    _serve(
        pipe,
        receiver,
        receiver.update_weights,
        lambda: (receiver.version, sorted({float(v) for tensor in engine.weights.values() for v in tensor.unique()})),
    )
