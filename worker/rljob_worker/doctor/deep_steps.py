"""The steps of `--deep`, each the main program of a process: what a job does with a device, at its smallest."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypedDict

import torch
import torch.distributed as dist

from rljob_api.how_many import how_many
from rljob_api.spec import MemorySaverMode
from rljob_worker.devices import Device, get_device
from rljob_worker.devices.base import AcceleratorMemory
from rljob_worker.devices.checksum import device_checksum, wraps_around
from rljob_worker.doctor.deep import MODULE, Settings, answer
from rljob_worker.doctor.deep_engine import engine, graphs
from rljob_worker.doctor.devices import VISIBLE_VARIABLES
from rljob_worker.doctor.findings import Finding, not_applicable, ok, problem
from rljob_worker.doctor.programs import last_line
from rljob_worker.doctor.units import size
from rljob_worker.weightsync.shared_memory import SharedMemory

BYTES = 256 << 20
"""Size of the tensors that sleep, are shared and are reduced."""
_SECONDS = 300.0
_CONNECT_SECONDS = "60"
"""Connect timeout of HCCL. A job waits two hours for its last process; here HCCL's own message is wanted within the
deadline."""


class RankSettings(Settings):
    """Arguments of a process of `collective`."""

    rank: int
    port: int


class Shared(TypedDict, total=False):
    """Place of the memory for the second process of `sharing`: names of slots on the CPU, an exported tensor's message,
    in base64, elsewhere."""

    kind: str
    names: list[str]
    message: str


def saver(settings: Settings) -> Finding:
    """Let memory sleep and wake: it must be free meanwhile, and its contents come back."""
    device = get_device(settings["kind"])
    if settings["kind"] == "cpu":
        return _arena(device)
    name, mode = "saver", MemorySaverMode(settings["saver"])
    if mode is MemorySaverMode.OFF:
        return not_applicable(name, "spec.memorySaver.mode is off")
    from rljob_worker.memory.saver_checks import verified_torch_saver

    assert isinstance(device, AcceleratorMemory)
    verified_torch_saver(mode, device)
    return ok(name, f"{size(BYTES)} slept and woke, contents intact", "free meanwhile, and intact after")


def _arena(device: Device) -> Finding:
    from rljob_worker.host.memory import process_resident_bytes
    from rljob_worker.memory.arena import Arena, Tag
    from rljob_worker.memory.states import MemorySaver

    name, wanted = "saver", "free meanwhile, and intact after"
    arena = Arena()
    machine = MemorySaver(arena, device)
    dropped = arena.allocate((BYTES,), torch.uint8, Tag.DISCARD).fill_(90)
    kept = arena.allocate((1 << 20,), torch.uint8, Tag.BACKUP).fill_(165)
    before = process_resident_bytes()
    machine.pause()
    freed = before - process_resident_bytes()
    machine.resume()
    intact = bool((kept == 165).all()) and dropped.numel() == BYTES
    found = f"{size(freed)} of {size(BYTES)} given back, contents {'intact' if intact else 'lost'}"
    if intact and freed > 0.9 * BYTES:
        return ok(name, found, wanted)
    return problem(name, found, wanted, "the kernel does not move pages (Linux 5.7 or later); memorySaver.mode: off")


def checksum(settings: Settings) -> Finding:
    """With the arithmetic that every device has, over bytes that use all bits, on the device and on the CPU."""
    name, wanted = "checksum", "equal to the CPU's"
    device = get_device(settings["kind"])
    data = torch.randint(-(2**31), 2**31, (BYTES // 4,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    there = data.to(device.torch_device)
    try:
        form = "" if wraps_around(device.torch_device) else ", by limbs: its 64-bit integers do not wrap around"
        device_checksum(there)
        device.synchronize()
        begin = time.perf_counter()
        found = device_checksum(there)
        seconds = time.perf_counter() - begin
    except ArithmeticError as error:
        return problem(name, str(error), wanted, "another version of the device's operators; the weight sync needs it")
    if found != (right := device_checksum(data)):
        return problem(name, f"{found:x} there, {right:x} on the CPU", wanted, "another version of its operators")
    return ok(name, f"{found:x}, {BYTES / seconds / 2**30:.1f} GiB/s{form}", wanted)


def sharing(settings: Settings) -> Finding:
    """Hand a tensor to a second process as a weight sync does, without a copy; both must see the same bytes."""
    device = get_device(settings["kind"])
    if settings["kind"] == "cpu":
        slots = SharedMemory.create("doctor", BYTES)
        try:
            return _ask_peer(device, slots.bytes_of(0).copy_(_pattern(device)), {"names": list(slots.names)})
        finally:
            slots.close()
    tensor = _pattern(device)
    device.synchronize()
    message = base64.b64encode(device.share(tensor)).decode()
    return _ask_peer(device, tensor, {"kind": settings["kind"], "message": message})


def _pattern(device: Device) -> torch.Tensor:
    return torch.arange(BYTES, dtype=torch.int32, device=device.torch_device).to(torch.uint8)


def _ask_peer(device: Device, tensor: torch.Tensor, shared: Shared) -> Finding:
    name, wanted, begin = "sharing", "equal checksums on both sides", time.perf_counter()
    answered = subprocess.run(
        [sys.executable, "-m", MODULE, "peer", json.dumps(shared)], capture_output=True, text=True, timeout=_SECONDS
    )
    seconds = time.perf_counter() - begin
    if answered.returncode:
        fix = "one IPC and mount namespace for both processes; on NPUs driver 25.3.RC1 and CANN 8.3.RC1 or later"
        return problem(name, answered.stderr.strip()[-300:] or f"exit code {answered.returncode}", wanted, fix)
    theirs, own = int(answered.stdout.split()[-1]), device.checksum(tensor)
    if theirs != own:
        return problem(
            name, f"{theirs:x} there, {own:x} here", wanted, "the second process sees another device's memory"
        )
    return ok(name, f"{size(BYTES)} seen by a second process, which took {seconds:.1f} s in all", wanted)


def peer(settings: Shared) -> None:
    """The second process of `sharing`: print the checksum of what it sees."""
    device = get_device(settings.get("kind", "cpu"))
    if "names" in settings:
        print(device.checksum(SharedMemory.attach(settings["names"], BYTES).bytes_of(0)))
        return
    print(device.checksum(device.open_shared(base64.b64decode(settings["message"]))))


def collective(settings: Settings) -> Finding:
    """All-reduce over the devices, a process each, with the backend of the trainers."""
    name, count = "collective", len(settings["devices"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with contextlib.ExitStack() as stack:
        # Files, and not pipes: while one rank is listened to, another must not wait for a reader of its warnings. Apart
        # from what is printed on purpose: libraries have a last word when the process ends.
        said = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in settings["devices"]]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", MODULE, "rank", json.dumps(_of_rank(settings, rank, port))],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **_one_device(settings["kind"], shown), "HCCL_CONNECT_TIMEOUT": _CONNECT_SECONDS},
            )
            for rank, (shown, errors) in enumerate(zip(settings["devices"], said, strict=True))
        ]
        try:
            deadline = time.monotonic() + _SECONDS
            outputs = [rank.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        bad = [i for i, rank in enumerate(ranks) if rank.returncode]
        wanted = f"the sum over {how_many(count, 'device')}"
        if bad:
            said[bad[0]].seek(0)
            why = last_line(said[bad[0]].read()) or last_line(outputs[bad[0]]) or "nothing"
            fix = "HCCL: interface, links and TLS above; ASCEND_GLOBAL_LOG_LEVEL=1 says more"
            return problem(name, f"rank {bad[0]}: {why}", wanted, fix)
    seconds = max(float(last_line(output)) for output in outputs)
    rate = 2 * (count - 1) / count * BYTES / seconds / 2**30
    return ok(name, f"{size(BYTES)} over {count} in {seconds * 1000:.0f} ms (bus {rate:.1f} GiB/s)", wanted)


def _of_rank(settings: Settings, rank: int, port: int) -> RankSettings:
    return {**settings, "rank": rank, "port": port}


def _one_device(kind: str, shown: str) -> dict[str, str]:
    """Variables by which Ray shows a trainer its device."""
    return {VISIBLE_VARIABLES[kind]: shown} if kind in VISIBLE_VARIABLES else {}


def rank(settings: RankSettings) -> None:
    """One process of `collective`; prints the seconds of the second round, the first one connects."""
    number, count = settings["rank"], len(settings["devices"])
    device = get_device(settings["kind"], number)
    address = f"tcp://127.0.0.1:{settings['port']}"
    dist.init_process_group(
        device.process_group_backend, init_method=address, rank=number, world_size=count, timeout=timedelta(seconds=120)
    )
    seconds = 0.0
    for _ in range(2):
        tensor = torch.full((BYTES // 4,), float(number + 1), device=device.torch_device)
        device.synchronize()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        device.synchronize()
        seconds = time.perf_counter() - begin
        if not bool((tensor == count * (count + 1) / 2).all()):
            raise RuntimeError(f"the sum is {tensor[0].item()}, not {count * (count + 1) / 2}")
    dist.destroy_process_group()
    print(seconds)


_STEPS: dict[str, Callable[..., Finding | None]] = {
    step.__name__: step for step in (saver, checksum, sharing, collective, engine, graphs, peer, rank)
}


def main() -> None:
    """Run the step that the command line names."""
    found = _STEPS[sys.argv[1]](json.loads(sys.argv[2]))
    if found is not None:
        answer(found)


if __name__ == "__main__":
    main()
