"""The ledger, and the readings behind it."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest
import torch

from rljob_worker.devices.cpu import CpuDevice
from rljob_worker.host.memory import HostMemory, process_resident_bytes
from rljob_worker.memory.arena import Arena
from rljob_worker.memory.ledger import MemoryLedger

GIB = 1024**3
MEMINFO = f"MemTotal: {32 * GIB // 1024} kB\nMemFree: 10 kB\nMemAvailable: {20 * GIB // 1024} kB\n"


def write(root: Path, files: dict[str, str]) -> HostMemory:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return HostMemory(root)


def test_entries_tell_what_sleeps() -> None:
    arena = Arena(256 * 1024**2)
    kept, dropped = arena.allocate((1 << 20,)).fill_(1), arena.allocate((1 << 19,), tag="discard").fill_(1)
    ledger = MemoryLedger(3, CpuDevice(), arena)
    awake = ledger.record("actor_train", resident=True)
    arena.pause()
    asleep = ledger.record("sleep", resident=True)
    arena.resume()
    assert (awake.rank, awake.phase, awake.paused, awake.backup) == (3, "actor_train", 0, 0)
    assert awake.arena_resident is not None
    assert awake.arena_resident >= 6 * 1024**2
    assert (asleep.paused, asleep.backup, asleep.arena_resident) == (6 * 1024**2, 4 * 1024**2, 0)
    assert awake.free + awake.used == asleep.free + asleep.used
    assert asleep.process_resident > 4 * 1024**2
    assert asleep.as_dict()["phase"] == "sleep"
    assert (kept.numel(), dropped.numel()) == (1 << 20, 1 << 19)


def test_a_reading_is_cheap_and_frees_nothing() -> None:
    arena = Arena(64 * 1024**2)
    tensor = arena.allocate((1000,)).fill_(1)
    ledger = MemoryLedger(0, CpuDevice(), arena)
    seconds = []
    for _ in range(200):
        start = time.perf_counter()
        ledger.record("rollout")
        seconds.append(time.perf_counter() - start)
    assert statistics.median(seconds) < 1e-3
    assert torch.equal(tensor, torch.ones(1000))


def test_host_memory_without_a_limit(tmp_path: Path) -> None:
    info = write(tmp_path, {"proc/self/cgroup": "0::/user.slice\n"}).info()
    assert (info.free, info.total, info.used) == (20 * GIB, 32 * GIB, 12 * GIB)


@pytest.mark.parametrize("path", ["/", "/kubepods/pod1/container"])
def test_a_version_2_limit_counts_without_page_cache(tmp_path: Path, path: str) -> None:
    folder = f"sys/fs/cgroup{path.rstrip('/')}"
    host = write(
        tmp_path,
        {
            "proc/self/cgroup": f"0::{path}\n",
            f"{folder}/memory.max": str(8 * GIB),
            f"{folder}/memory.current": str(6 * GIB),
            f"{folder}/memory.stat": f"anon {3 * GIB}\ninactive_file {2 * GIB}\n",
        },
    )
    assert (host.info().free, host.info().total) == (4 * GIB, 8 * GIB)
    (tmp_path / folder / "memory.max").write_text("max\n")
    assert host.info().free == 20 * GIB


def test_the_tightest_of_nested_limits_counts(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/pod/container\n"}
    for folder, limit in (("pod", 4 * GIB), ("pod/container", 16 * GIB)):
        files[f"sys/fs/cgroup/{folder}/memory.max"] = str(limit)
        files[f"sys/fs/cgroup/{folder}/memory.current"] = str(3 * GIB)
        files[f"sys/fs/cgroup/{folder}/memory.stat"] = "inactive_file 0\n"
    assert write(tmp_path, files).info().free == GIB


def test_a_version_1_limit_counts_when_the_path_is_the_hosts(tmp_path: Path) -> None:
    host = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/kubepods/x\n4:memory:/kubepods/x\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(3 * GIB),
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {512 * 1024**2}\n",
        },
    )
    assert (host.info().free, host.info().total) == (0, 2 * GIB)
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert host.info().free == 20 * GIB


def test_this_host_is_read() -> None:
    info = HostMemory().info()
    assert 0 < info.free < info.total
    assert process_resident_bytes() > 10 * 1024**2
