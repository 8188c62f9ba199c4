"""Decisions of the device memory saver without a device: pinned pieces, checks as data, the host's budget.

How it sleeps and wakes: tests/contract/test_npu.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.spec import MemorySaverMode
from rljob_worker.devices.cpu import CpuDevice
from rljob_worker.devices.npu import NpuDevice
from rljob_worker.errors import UserError
from rljob_worker.host.memory import MemoryInfo
from rljob_worker.memory import host_copy
from rljob_worker.memory.arena import Arena
from rljob_worker.memory.host_copy import HostCopy, parts, piece_sizes
from rljob_worker.memory.saver_checks import (
    SaverFacts,
    allocator_check,
    mapped_libraries,
    preload_checks,
    refuse_failed,
    torch_checks,
)
from rljob_worker.memory.sleeping import SleepingMemory, sleeping_memory
from rljob_worker.memory.torch_saver import HostMemoryShortage, TorchMemorySaver

MIB = 1024**2


@given(st.integers(0, 200 * 1024**3))
def test_pinned_pieces_are_powers_of_two_and_waste_little(nbytes: int) -> None:
    sizes = piece_sizes(nbytes)
    assert nbytes <= sum(sizes) < nbytes + 32 * MIB
    assert all(size & (size - 1) == 0 for size in sizes)
    assert sizes == sorted(set(sizes), reverse=True)


@given(st.integers(1, 999), st.data())
def test_a_host_copy_gives_back_what_was_stored(nbytes: int, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copy, "_SMALLEST", 4)
        source = torch.arange(nbytes).to(torch.uint8)
        copy = HostCopy(nbytes, pinned=False)
        copy.store(source)
        start = data.draw(st.integers(0, nbytes))
        length = data.draw(st.integers(0, nbytes - start))
        assert torch.equal(copy.read(start, length), source[start : start + length])
        assert sum(part.length for part in parts(copy._sizes, start, length)) == length
        target = torch.zeros_like(source)
        copy.load(target)
        assert torch.equal(target, source)


def test_the_cpu_gets_its_arena_and_off_nothing() -> None:
    arena = sleeping_memory(MemorySaverMode.PRELOAD, CpuDevice())
    assert isinstance(arena, Arena)
    assert isinstance(arena, SleepingMemory)
    assert sleeping_memory(MemorySaverMode.OFF, CpuDevice()) is None


HOOK = "/opt/rljob/lib/torch_memory_saver_hook_mode_preload.abi3.so"
GOOD = {
    "LD_PRELOAD": HOOK,
    "TMS_HOOK_MODE": "preload",
    "TMS_INIT_ENABLE": "1",
    "TMS_INIT_ENABLE_CPU_BACKUP": "1",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False",
}
DEVICE: Any = SimpleNamespace(
    allocator_variable=NpuDevice.allocator_variable, hooked_function=NpuDevice.hooked_function
)


def facts(changed: dict[str, str] | None = None, **other: Any) -> SaverFacts:
    known = {"mapped": (HOOK,), "pause_in": HOOK, "hook_in": HOOK, "tracking": True} | other
    return SaverFacts(environment=GOOD | (changed or {}), **known)


def failed(given_facts: SaverFacts) -> list[str]:
    return [check.name for check in preload_checks(given_facts, DEVICE) if not check.passed]


@pytest.mark.parametrize(
    ("given_facts", "names"),
    [
        (facts(), []),
        (facts({"LD_PRELOAD": f"/usr/lib/libjemalloc.so.2:{HOOK}"}), ["LD_PRELOAD"]),
        (facts({"LD_PRELOAD": f"{HOOK} /usr/lib/libjemalloc.so.2"}), ["LD_PRELOAD"]),
        (facts(mapped=()), ["memory saver library", "tms_pause", "allocation hook"]),
        (
            facts(mapped=(HOOK, "/x/torch_memory_saver_hook_mode_torch.so")),
            ["memory saver library", "tms_pause", "allocation hook"],
        ),
        (facts(pause_in=None, tracking=None), ["tms_pause", "tracking"]),
        (facts(hook_in="/usr/local/Ascend/lib64/libascendcl.so"), ["allocation hook"]),
        (facts(tracking=False), ["tracking"]),
        (facts({"TMS_HOOK_MODE": "torch"}), ["TMS_HOOK_MODE"]),
        (facts({"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:64, expandable_segments : true"}), ["allocator settings"]),
        (facts({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}), ["allocator settings"]),
        (facts({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}), ["allocator settings"]),
    ],
)
def test_each_fault_is_found(given_facts: SaverFacts, names: list[str]) -> None:
    assert failed(given_facts) == names


def test_torch_mode_refuses_a_preloaded_library_beside_it(tmp_path: Any) -> None:
    library = tmp_path / "torch_memory_saver_hook_mode_torch.abi3.so"
    library.touch()
    good = facts({"TMS_HOOK_MODE": "torch", "LD_PRELOAD": ""}, pause_in=None)
    assert all(check.passed for check in torch_checks(good, DEVICE, str(library)))
    bad = [check.name for check in torch_checks(facts(), DEVICE, "/nowhere.so") if not check.passed]
    assert bad == ["memory saver library", "LD_PRELOAD", "TMS_HOOK_MODE"]


def test_a_refusal_says_what_was_found_what_is_wanted_and_what_to_do() -> None:
    check = allocator_check({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}, DEVICE)
    with pytest.raises(UserError, match=r"spec.memorySaver.*found PYTORCH_NPU_ALLOC_CONF=exp.*; set PYTORCH_NPU_ALLOC"):
        refuse_failed([check])
    refuse_failed([])


def test_mapped_libraries_are_read_from_the_kernels_table() -> None:
    maps = (
        f"7f00-7f01 r-xp 00000000 08:01 77    {HOOK}\n7f01-7f02 r--p 00000000 08:01 77    {HOOK}\n"
        "7f02-7f03 rw-p 00000000 00:00 0\n7f03-7f04 r-xp 00000000 08:01 8    /usr/lib/libc.so.6\n"
        "7f04-7f05 r--p 00000000 08:01 9    /x/torch_memory_saver/README.md\n"
    )
    assert mapped_libraries(maps) == (HOOK,)


class Quiet:
    """A device and a library that only take notes."""

    mode = MemorySaverMode.PRELOAD
    torch_device = torch.device("cpu")
    tracking = True

    def __init__(self, reserved: int, free: int) -> None:
        self.calls: list[str] = []
        self._reserved, self._free = reserved, free

    def reserved_bytes(self) -> int:
        return self._reserved

    def info(self) -> MemoryInfo:
        return MemoryInfo(self._free, 1 << 40)

    def new_pool(self, allocator: object = None) -> None:
        """No pool."""

    def allocator(self) -> None:
        """No library."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append(name)


def test_pinned_memory_that_no_copy_holds_any_more_goes_back_after_a_pause() -> None:
    noted: Any = Quiet(reserved=0, free=1 << 30)
    noted.pause = lambda: noted.calls.append("pause")
    saver = TorchMemorySaver(noted, noted, host=noted)
    saver.pause()
    assert noted.calls[0] == "empty_cache"
    assert noted.calls[-2:] == ["pause", "empty_host_cache"]
    saver.pause()
    assert noted.calls.count("empty_host_cache") == 1


def test_the_hosts_budget_is_looked_at_before_anything_moves() -> None:
    noted: Any = Quiet(reserved=1000 * MIB, free=1000 * MIB - 1)
    saver = TorchMemorySaver(noted, noted, host=noted)
    saver._kept.append(SimpleNamespace(nbytes=1, host=None, bytes_on_device=lambda: torch.zeros(1)))  # type: ignore[arg-type]
    saver._grown["backup"] = 32 * MIB  # type: ignore[index]
    with pytest.raises(
        HostMemoryShortage, match=r"33554432 bytes of pinned .* up to 1015021568 bytes .*raise the pod's"
    ):
        saver.pause()
    assert noted.calls == ["empty_cache"]
    assert not saver.paused
