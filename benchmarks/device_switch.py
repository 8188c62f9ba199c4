"""Device time of a switch: sleep and wake against a pinned copy, sharing weights against a device copy.

    python benchmarks/device_switch.py --device npu|cuda|cpu [--mode preload] [--gibibytes 8] [--repeats 5]

Sleep and wake: half of the memory has tag `backup` (weights, optimizer), half `discard` (gradients). Given are the
bytes that the device really has free afterwards, and GB/s of the kept half; the peer is the copy of as many bytes
between the device and pinned host memory, measured in the same run.
Sharing: a second process opens a parameter set of Qwen3-4B's shapes through two staging slots and copies it into its
own parameters, with checksums on both sides; the peer is one copy of the same bytes inside the device.

On npu and cuda it starts itself again with a trainer's variables: LD_PRELOAD (the worker images' library, unless
another is preloaded), TMS_* and the allocator's. On cpu the arena moves pages instead of copying: sleep and wake stand
against a memory copy there, and there is nothing to share.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import cast

import torch
from figures import Figure, report

from rljob_api.roles import device_memory_variables
from rljob_api.spec import MemorySaverMode, Profile
from rljob_worker.devices import Device, get_device
from rljob_worker.memory.host_copy import HostCopy
from rljob_worker.memory.sleeping import SleepingMemory, sleeping_memory
from rljob_worker.memory.states import MemorySaver

GIB = 1024**3
PROFILES = {"npu": Profile("ascend-a2"), "cuda": Profile("cuda")}
SLOT_BYTES = 512 * 1024**2
SLOTS = 2
CPU_LIMIT = 1.0


def qwen3_4b(layers: int = 36) -> list[tuple[int, ...]]:
    """Shapes of Qwen3-4B's parameters: hidden 2560, 32 + 2 x 8 heads of 128, feed-forward 9728, tied embedding."""
    layer = [(4096, 2560), (1024, 2560), (1024, 2560), (2560, 4096), (128,), (128,)]
    layer += [(9728, 2560), (9728, 2560), (2560, 9728), (2560,), (2560,)]
    return [(151936, 2560), *layer * layers, (2560,)]


def seconds(device: Device, call: Callable[[], object]) -> float:
    device.synchronize()
    start = time.perf_counter()
    call()
    device.synchronize()
    return time.perf_counter() - start


def sleep_and_wake(device: Device, memory: SleepingMemory, nbytes: int, repeats: int) -> list[Figure]:
    with memory.region("backup"):
        kept = torch.zeros(nbytes // 2, dtype=torch.uint8, device=device.torch_device).fill_(7)
    with memory.region("discard"):
        dropped = torch.zeros(nbytes // 2, dtype=torch.uint8, device=device.torch_device).fill_(1)
    machine = MemorySaver(memory, device)
    # As a trainer does once it stands.
    gc.freeze()
    total = device.checksum(kept)
    machine.pause()
    machine.resume()
    freed, down, up = [], [], []
    for _ in range(repeats):
        dropped.fill_(1)
        before = device.memory_info().free
        down.append(machine.pause().seconds)
        freed.append(device.memory_info().free - before)
        up.append(machine.resume().seconds)
    if device.checksum(kept) != total:
        raise RuntimeError("contents changed over sleep and wake-up")
    sleep, wake = statistics.median(down), statistics.median(up)
    print(
        f"sleep {sleep:.3f} s, wake {wake:.3f} s, {statistics.median(freed) / GIB:.2f} GiB of {nbytes / GIB:.2f} freed"
    )
    if not device.own_memory:
        copy = statistics.median(seconds(device, kept.clone) for _ in range(repeats))
        what, against = f"sleep + wake of {nbytes / GIB:g} GiB on the cpu device", "a copy of the half that is kept"
        return [Figure(what, against, (sleep + wake) / copy, CPU_LIMIT, at_most=True)]
    rate = nbytes / 2 / 1e9
    print(f"  kept half: {rate / sleep:.1f} GB/s to the host, {rate / wake:.1f} GB/s back")
    host = HostCopy(nbytes // 2)
    out = statistics.median(seconds(device, lambda: host.store(kept)) for _ in range(repeats))
    back = statistics.median(seconds(device, lambda: host.load(kept)) for _ in range(repeats))
    print(
        f"  pinned copy: {rate / out:.1f} and {rate / back:.1f} GB/s; "
        f"sleep / copy {sleep / out:.2f}, wake / copy {wake / back:.2f}"
    )
    return []


def in_slots(shapes: list[tuple[int, ...]]) -> Iterator[list[tuple[int, int, int]]]:
    """Fillings of a slot: (parameter, first byte of it, bytes), parameters of bf16 cut where a slot is full."""
    filling: list[tuple[int, int, int]] = []
    room = SLOT_BYTES
    for number, shape in enumerate(shapes):
        start, end = 0, 2 * torch.Size(shape).numel()
        while start < end:
            part = min(room, end - start)
            filling.append((number, start, part))
            start, room = start + part, room - part
            if not room:
                yield filling
                filling, room = [], SLOT_BYTES
    if filling:
        yield filling


def parameters(device: Device, shapes: list[tuple[int, ...]], value: float) -> list[torch.Tensor]:
    return [torch.full(shape, value, dtype=torch.bfloat16, device=device.torch_device) for shape in shapes]


def as_bytes(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.view(-1).view(torch.uint8) for tensor in tensors]


def receive(device: Device, layers: int) -> None:
    """The engine's side: opens the slots once, then empties one for each line it reads."""
    shapes = qwen3_4b(layers)
    target = as_bytes(parameters(device, shapes, 0.0))
    slots = [device.open_shared(sys.stdin.readline().strip().encode()) for _ in range(SLOTS)]
    print("ready", flush=True)
    while sys.stdin.readline():
        total = 0
        for number, filling in enumerate(in_slots(shapes)):
            sys.stdin.readline()
            at, begun = 0, []
            for parameter, start, length in filling:
                part = target[parameter][start : start + length]
                part.copy_(slots[number % SLOTS][at : at + length])
                begun.append(device.begin_checksum(part))
                at += length
            total += sum(device.end_checksums(begun))
            print("taken", flush=True)
        print(total, flush=True)


def share(device: Device, memory: SleepingMemory | None, layers: int, repeats: int, arguments: list[str]) -> None:
    if not device.own_memory:
        print("sharing: does not exist on cpu, slots are host memory (benchmarks/weight_sync.py)")
        return
    shapes = qwen3_4b(layers)
    source = as_bytes(parameters(device, shapes, 1.5))
    nbytes = sum(data.numel() for data in source)
    with cast(SleepingMemory, memory).staging():
        slots = [torch.empty(SLOT_BYTES, dtype=torch.uint8, device=device.torch_device) for _ in range(SLOTS)]
    command = [sys.executable, __file__, *arguments, "--receive"]
    # As an engine is started: without the memory saver.
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD" and not name.startswith("TMS_")}
    peer = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert peer.stdin is not None
    assert peer.stdout is not None
    ask, answer = peer.stdin, peer.stdout

    def tell(line: str) -> None:
        ask.write(f"{line}\n")
        ask.flush()

    def hear(wanted: str) -> None:
        if answer.readline().strip() != wanted:
            raise RuntimeError("the receiving process failed; its output is above")

    for slot in slots:
        tell(device.share(slot).decode())
    hear("ready")

    def sync() -> None:
        tell("begin")
        pending = total = 0
        for number, filling in enumerate(in_slots(shapes)):
            if number >= SLOTS:
                hear("taken")
                pending -= 1
            at, begun = 0, []
            for parameter, start, length in filling:
                part = source[parameter][start : start + length]
                slots[number % SLOTS][at : at + length].copy_(part)
                begun.append(device.begin_checksum(part))
                at += length
            total += sum(device.end_checksums(begun))
            tell("filled")
            pending += 1
        for _ in range(pending):
            hear("taken")
        hear(str(total))

    took = statistics.median([seconds(device, sync) for _ in range(repeats + 1)][1:])
    copies = [torch.empty_like(data) for data in source]
    copy = statistics.median(
        seconds(device, lambda: [to.copy_(data) for to, data in zip(copies, source, strict=True)])
        for _ in range(repeats)
    )
    print(f"sharing {nbytes / 1e9:.2f} GB: {took:.3f} s verified; device copy {copy:.4f} s; ratio {took / copy:.1f}")
    ask.close()
    peer.wait(timeout=60)


def start_as_trainer(profile: Profile, mode: MemorySaverMode) -> None:
    """Restart with the variables that the loader and the allocator read only when a process starts."""
    wanted = device_memory_variables(profile, mode)
    if missing := {name: value for name, value in wanted.items() if name not in os.environ}:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | missing)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", required=True, choices=["npu", "cuda", "cpu"])
    parser.add_argument("--mode", default="preload", choices=["preload", "torch"])
    parser.add_argument("--gibibytes", type=float, default=8.0, help="memory that sleeps")
    parser.add_argument("--layers", type=int, default=36, help="layers of the parameter set that is shared")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.device in PROFILES and not chosen.receive:
        start_as_trainer(PROFILES[chosen.device], MemorySaverMode(chosen.mode))
    device = get_device(chosen.device)
    device.set_current()
    if chosen.receive:
        receive(device, chosen.layers)
        return 0
    memory = sleeping_memory(MemorySaverMode(chosen.mode), device)
    assert memory is not None
    print(f"{device.identity()}, memory saver {chosen.mode if device.own_memory else 'arena'}")
    figures = sleep_and_wake(device, memory, int(chosen.gibibytes * GIB), chosen.repeats)
    share(device, memory, chosen.layers, chosen.repeats, [arg for arg in sys.argv[1:] if arg != "--receive"])
    return report(figures)


if __name__ == "__main__":
    sys.exit(main())
