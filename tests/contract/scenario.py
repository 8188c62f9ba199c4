"""Device code on an NPU: `python scenario.py NAME [VARIABLE=VALUE | VARIABLE]...`, a process for each.

A variable is set, or removed, before anything touches the device.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from unittest import mock

import pytest
import torch
from sync_cases import KeepingEngineOnDevice, model_weights, pieces_for, plan_for

from rljob_api.spec import MemorySaverMode, OptimizerSpec
from rljob_worker.devices import get_device
from rljob_worker.devices.checksum import device_checksum
from rljob_worker.devices.npu import NpuDevice
from rljob_worker.memory.saver_checks import verified_torch_saver
from rljob_worker.memory.sleeping import SleepingMemory
from rljob_worker.memory.states import MemorySaver, MemorySaverState, MemoryShortage, TransitionRefused
from rljob_worker.memory.torch_saver import TorchMemorySaver
from rljob_worker.trainer import state_buckets
from rljob_worker.trainer.fsdp.optimizer import ShardedAdamW
from rljob_worker.weightsync.device_ipc import Exchange
from rljob_worker.weightsync.engine import WeightSyncEngine
from rljob_worker.weightsync.routes import HostRoute
from rljob_worker.weightsync.trainer import WeightSyncTrainer

MIB = 1024**2
MODE = MemorySaverMode(os.environ["TMS_HOOK_MODE"])
SYNC_SECONDS = 60.0
BUCKET = 6000
ROWS = {"a": (50, 100), "b": (70, 100), "norm": (30,), "c": (40, 100), "d": (20, 100), "bias": (10,)}
VERSIONS = (1, 2, 3)


def start() -> tuple[NpuDevice, TorchMemorySaver, MemorySaver]:
    device = get_device("ascend-a2", 3)
    assert isinstance(device, NpuDevice)
    saver = verified_torch_saver(MODE, device, probe_bytes=8 * MIB)
    assert isinstance(saver, SleepingMemory)
    return device, saver, MemorySaver(saver, device, margin_bytes=64 * MIB)


def cycle() -> None:
    device, saver, machine = start()
    with saver.region("backup"):
        weights = torch.arange(2 * MIB, dtype=torch.int32, device="npu")
        other = torch.ones(100, 7, dtype=torch.bfloat16, device="npu").t()
    with saver.region("discard"):
        gradients = torch.ones(4 * MIB, dtype=torch.float32, device="npu")
    plain = torch.full((1000,), 3.0, device="npu")
    total = device.checksum(weights)
    assert total == device_checksum(weights.cpu())
    view = weights[5:5000:3]
    free = []
    for number in range(5):
        before = device.memory_info().free
        down = machine.pause()
        assert device.memory_info().free - before >= 24 * MIB, "weights and gradients are given back"
        assert down.moved_bytes >= 24 * MIB
        assert 32 * MIB <= down.backup_bytes < 128 * MIB
        assert not machine.pause().changed
        assert torch.equal(saver.readable(weights), torch.arange(2 * MIB, dtype=torch.int32))
        assert torch.equal(saver.readable(view), torch.arange(5, 5000, 3, dtype=torch.int32))
        assert saver.readable(other).shape == (7, 100)
        for unkept in (gradients, plain) if MODE is MemorySaverMode.PRELOAD else (gradients,):
            with pytest.raises(TransitionRefused, match="not made in a region with tag backup"):
                saver.readable(unkept)
        with saver.staging():
            slot = torch.full((MIB,), number, dtype=torch.uint8, device="npu")
        assert int(slot[-1]) == number
        refused(machine, saver, device)
        assert machine.resume().changed
        assert device.checksum(weights) == total
        assert float(plain.sum()) == 3000.0
        gradients.zero_()
        free.append(device.memory_info().free)
    assert len(set(free[2:])) == 1, f"memory leaks: {free}"
    print("identity", device.identity(), device.index, device.process_group_backend)


def refused(machine: MemorySaver, saver: TorchMemorySaver, device: NpuDevice) -> None:
    """Waking with too little free memory, and a region while asleep."""
    with pytest.raises(TransitionRefused, match="open a region"), saver.region("backup"):
        pass
    short = MemorySaver(saver, device, margin_bytes=device.memory_info().free)
    with pytest.raises(MemoryShortage):
        short.resume()
    assert short.state is MemorySaverState.PAUSED


def touch() -> None:
    _, saver, machine = start()
    with saver.region("backup"):
        weights = torch.ones(MIB, device="npu")
    machine.pause()
    print("paused", flush=True)
    weights.sum()


def twice() -> None:
    _, saver, machine = start()
    with saver.region("backup"):
        weights = torch.ones(MIB, device="npu")
    machine.pause()
    print("paused", weights.shape, flush=True)
    saver._library.pause()


def cached() -> None:
    """Allocating outside of staging while paused gets a cached block that is unmapped."""
    _, saver, machine = start()
    with saver.region("backup"):
        kept = torch.ones(MIB, device="npu")
    died_later = torch.ones(MIB, device="npu")
    machine.pause()
    del died_later
    with saver.staging():
        torch.ones(MIB, device="npu")
    print("paused", kept.shape, flush=True)
    torch.ones(MIB, device="npu")


def short() -> None:
    """An allocation into the margin is refused by torch, which gives its cache back first; the process lives on."""
    device, _, machine = start()
    device.keep_free(64 * MIB)
    free = device.memory_info().free
    cache = torch.ones((free - 128 * MIB) // 4, device="npu")
    del cache
    kept = torch.ones((free - 96 * MIB) // 4, device="npu")
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(64 * MIB, device="npu")
    assert device.memory_info().free >= 64 * MIB
    del kept
    machine.pause()
    machine.resume()
    print("alive")


def threads() -> None:
    """Memory that another thread makes while one stages sleeps with the rest, and staging never hands it out."""
    _, saver, machine = start()
    begun, made = threading.Event(), threading.Event()

    def elsewhere() -> None:
        begun.wait(30)
        torch.ones(8 * MIB, device="npu")
        made.set()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    with saver.staging():
        begun.set()
        assert made.wait(30)
    thread.join()
    machine.pause()
    with saver.staging():
        slot = torch.ones(8 * MIB, device="npu")
    assert float(slot[-1]) == 1.0
    machine.resume()
    print("apart")


def offload() -> None:
    """A state on the host, in buckets through two buffers, gives the bits of one on the device."""
    device, *_ = start()
    found = []
    for overlap in (None, device.overlap):
        values = torch.Generator().manual_seed(1)
        rows = {name: torch.randn(shape, generator=values).to("npu") for name, shape in ROWS.items()}
        with mock.patch.object(state_buckets, "BUCKET_ELEMENTS", BUCKET):
            made = ShardedAdamW(rows, OptimizerSpec(weightDecay=0.1), nullcontext, overlap=overlap)
        assert all(flat.device.type == ("cpu" if overlap else "npu") for flat in [*made.flats, made.steps])
        for _ in range(3):
            made.step({name: torch.randn(shape, generator=values).to("npu") for name, shape in ROWS.items()}, 1e-2)
        found.append([tensor.cpu() for tensor in (*rows.values(), *made.flats, made.steps)])
    assert all(map(torch.equal, *found))
    print("same")


def share() -> None:
    device, saver, machine = start()
    with saver.region("backup"):
        weights = torch.ones(MIB, device="npu")
    with pytest.raises(RuntimeError, match=r"staging\(\)"):
        device.share(weights)
    with saver.staging():
        slot = torch.arange(6 * MIB, dtype=torch.int32, device="npu")
    part = slot[MIB:].view(-1, MIB)
    total = device.checksum(part)
    machine.pause()
    folder = Path(os.environ["SYNC_FOLDER"])
    (folder / "unfinished").write_text(f"{device.share(part).decode()} {total}")
    (folder / "unfinished").rename(folder / "shared")
    _wait_for(folder / "received")
    assert int(part[0, 0]) == 77, "the consumer's write is seen"
    print("seen")


def receive() -> None:
    folder = Path(os.environ["SYNC_FOLDER"])
    message, total = _wait_for(folder / "shared").read_text().rsplit(" ", 1)
    print(message)
    device = get_device("npu")
    part = device.open_shared(message.encode())
    assert (part.shape, part.device.type) == ((5, MIB), "npu")
    assert device.checksum(part) == int(total)
    part[0, 0] = 77
    device.synchronize()
    (folder / "received").touch()
    print("received")


def _wait_for(file: Path) -> Path:
    deadline = time.monotonic() + SYNC_SECONDS
    while not file.exists():
        assert time.monotonic() < deadline, f"no {file.name} within {SYNC_SECONDS:g} s"
        time.sleep(0.02)
    return file


def send() -> None:
    """A trainer: three versions handed over, its memory asleep between them, as the main loop does."""
    device, saver, machine = start()
    with saver.region("backup"):
        weights = {name: tensor.to("npu") for name, tensor in model_weights(0).items()}

    def allocate(nbytes: int) -> torch.Tensor:
        with saver.staging():
            return torch.empty(nbytes, dtype=torch.uint8, device="npu")

    plan = plan_for(weights, bucket_bytes=BUCKET)
    exchange = Exchange(device, [0], allocate)
    sender = WeightSyncTrainer(pieces_for(weights, 1)[0], plan, trainer=0, route=sync_route(), exchange=exchange)
    for version in VERSIONS:
        for tensor in weights.values():
            tensor.fill_(version)
        report = sender.update_weights(version, SYNC_SECONDS)
        assert report["bytes"] == sum(tensor.nbytes for tensor in weights.values())
        before = device.memory_info().free
        assert machine.pause().changed
        assert device.memory_info().free > before
        assert machine.resume().changed
        assert all(bool((tensor == version).all()) for tensor in weights.values())
    sender.close()
    print("sent", len(plan.buckets))


def land() -> None:
    device = get_device("npu")
    assert isinstance(device, NpuDevice)
    engine = KeepingEngineOnDevice(device)
    receiver = WeightSyncEngine(engine, route=sync_route(), engine=0)
    for version in VERSIONS:
        report = receiver.update_weights(version, SYNC_SECONDS)
        assert report["version"] == engine.finished_version == version
        assert all(tensor.device.type == "npu" for tensor in engine.weights.values())
        assert all(bool((tensor == version).all()) for tensor in engine.weights.values())
    receiver.close()
    print("landed", len(engine.weights))


def sync_route() -> HostRoute:
    return HostRoute(os.environ["SYNC_FOLDER"])


def check() -> None:
    start()
    print("verified")


def _record(called: set[str]) -> None:
    """Collect which functions of torch_npu are called, classes by their own name."""

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and "torch_npu" in frame.f_code.co_filename:
            called.add(frame.f_code.co_qualname.removesuffix(".__init__"))
        elif event == "c_call" and (name := getattr(argument, "__name__", "")).startswith("_npu_"):
            called.add(name)

    sys.setprofile(profile)


def _change(variables: list[str]) -> None:
    for variable in variables:
        name, given, value = variable.partition("=")
        if given:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)


if __name__ == "__main__":
    _change(sys.argv[2:])
    called: set[str] = set()
    if "CALLED" in os.environ:
        _record(called)
    globals()[sys.argv[1]]()
    sys.setprofile(None)
    print(*sorted(called), file=sys.stderr)
