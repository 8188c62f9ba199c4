"""The arena over real pages."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rljob_worker.host.memory import HostMemory, process_resident_bytes
from rljob_worker.memory.arena import Arena
from rljob_worker.memory.states import MemorySaverBroken, TransitionRefused

MIB = 1024 * 1024


@pytest.fixture
def arena() -> Arena:
    # Not closed: tensors of a failed test may outlive it in the traceback. The address space costs no memory.
    return Arena(1024 * MIB)


def filled(arena: Arena, mebibytes: int, tag: str) -> torch.Tensor:
    tensor = arena.allocate((mebibytes * MIB // 4,), torch.float32, tag)
    return tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float32))


def test_pages_are_away_while_paused_and_contents_come_back(arena: Arena) -> None:
    kept, dropped = filled(arena, 64, "backup"), filled(arena, 32, "discard")
    assert arena.resident_bytes() >= 96 * MIB
    assert (arena.paused_bytes, arena.backup_bytes, arena.resume_bytes) == (0, 0, 0)
    arena.pause()
    assert arena.resident_bytes() == 0
    assert 64 * MIB <= arena.backup_resident_bytes() <= 68 * MIB
    assert (arena.paused_bytes, arena.backup_bytes, arena.resume_bytes) == (96 * MIB, 64 * MIB, 32 * MIB)
    arena.resume()
    assert arena.backup_resident_bytes() == 0
    assert torch.equal(kept, torch.arange(kept.numel(), dtype=torch.float32))
    assert not dropped.any()


def test_discarded_pages_become_free_memory(arena: Arena) -> None:
    host = HostMemory()
    dropped = filled(arena, 256, "discard")
    gained = []
    # Other processes take and give memory meanwhile, so one quiet moment is enough; and a kernel or a sandbox may
    # count freed pages late, so each moment lasts a while.
    for _ in range(10):
        dropped.fill_(1)
        before_process, before_free = process_resident_bytes(), host.info().free
        arena.pause()
        assert before_process - process_resident_bytes() >= 240 * MIB
        deadline = time.monotonic() + 3
        while (rise := host.info().free - before_free) < 128 * MIB and time.monotonic() < deadline:
            time.sleep(0.05)
        arena.resume()
        gained.append(rise)
        if rise >= 128 * MIB:
            return
    pytest.fail(f"system free memory rose by {gained} bytes")


def test_both_calls_are_idempotent(arena: Arena) -> None:
    kept = filled(arena, 4, "backup")
    arena.resume()
    arena.pause()
    arena.pause()
    assert arena.paused
    arena.resume()
    arena.resume()
    assert not arena.paused
    assert torch.equal(kept, torch.arange(kept.numel(), dtype=torch.float32))


def test_backup_view_equals_the_contents_with_layout(arena: Arena) -> None:
    matrix = arena.allocate((33, 17), torch.bfloat16).copy_(torch.randn(33, 17))
    scalar = arena.allocate((), torch.int64).fill_(7)
    empty = arena.allocate((0, 3))
    expected = matrix.clone()
    column = matrix.t()[3:, 1::2]
    arena.pause()
    assert torch.equal(arena.backup_view(matrix), expected)
    assert torch.equal(arena.backup_view(column), expected.t()[3:, 1::2])
    assert arena.backup_view(column).stride() == column.stride()
    assert arena.backup_view(scalar).item() == 7
    assert arena.backup_view(empty).shape == (0, 3)
    assert torch.equal(arena.readable(matrix), expected)
    arena.resume()
    assert arena.readable(matrix).data_ptr() == matrix.data_ptr()


def test_backup_view_refuses_what_has_no_backup(arena: Arena) -> None:
    kept, dropped = arena.allocate((8,), tag="backup"), arena.allocate((8,), tag="discard")
    with pytest.raises(TransitionRefused, match="is ACTIVE"):
        arena.backup_view(kept)
    arena.pause()
    with pytest.raises(ValueError, match="tag discard"):
        arena.backup_view(dropped)
    with pytest.raises(ValueError, match="not in the arena"):
        arena.backup_view(torch.ones(3))
    arena.resume()


def test_nothing_is_allocated_while_paused(arena: Arena) -> None:
    arena.pause()
    with pytest.raises(TransitionRefused, match="PAUSED"):
        arena.allocate((4,))
    with pytest.raises(TransitionRefused, match="PAUSED"), arena.region("backup"):
        pass
    arena.resume()
    assert arena.allocate((4,)).sum() == 0


def test_freed_memory_is_reused_zeroed_and_given_back(arena: Arena) -> None:
    first = filled(arena, 16, "backup")
    address = first.data_ptr()
    view = first[5:]
    del first
    assert arena.allocated_bytes() == 16 * MIB, "a view keeps its storage"
    del view
    assert arena.allocated_bytes() == 0
    second = arena.allocate((16 * MIB // 4,))
    assert second.data_ptr() == address
    assert not second.any()
    second.fill_(1)
    del second
    arena.pause()
    assert arena.backup_resident_bytes() <= 2 * MIB
    arena.resume()


def test_tensors_freed_while_paused_are_accounted_for(arena: Arena) -> None:
    first, second = filled(arena, 8, "backup"), filled(arena, 8, "backup")
    arena.pause()
    del first
    assert arena.paused_bytes == 8 * MIB
    arena.resume()
    assert torch.equal(second, torch.arange(second.numel(), dtype=torch.float32))
    assert not arena.allocate((8 * MIB // 4,)).any()


def test_a_full_range_raises_and_stays_usable() -> None:
    arena = Arena(64 * MIB)
    kept = filled(arena, 48, "backup")
    with pytest.raises(MemoryError, match="tag backup: 33554432 bytes do not fit"):
        arena.allocate((8 * MIB,))
    assert arena.allocate((MIB,)).numel() == MIB
    assert arena.allocate((8 * MIB,), tag="discard").numel() == 8 * MIB
    arena.pause()
    arena.resume()
    assert torch.equal(kept, torch.arange(kept.numel(), dtype=torch.float32))


def test_grown_in_many_steps(arena: Arena) -> None:
    parts: list[torch.Tensor] = []
    for step in range(6):
        parts.append(filled(arena, 60, "backup" if step % 2 else "discard"))
        arena.pause()
        arena.resume()
    for part in parts[1::2]:
        assert torch.equal(part, torch.arange(part.numel(), dtype=torch.float32))


def test_fifty_cycles_do_not_grow(arena: Arena) -> None:
    kept, dropped = filled(arena, 32, "backup"), filled(arena, 32, "discard")

    def cycle() -> None:
        arena.pause()
        arena.backup_view(kept)[::4096].sum()
        arena.resume()
        dropped.fill_(3)
        arena.allocate((MIB,)).fill_(1)

    def footprint() -> tuple[int, int, int]:
        maps = len(Path("/proc/self/maps").read_text().splitlines())
        return process_resident_bytes(), maps, len(os.listdir("/proc/self/fd"))

    for _ in range(3):
        cycle()
    before = footprint()
    for _ in range(50):
        cycle()
    after = footprint()
    # What a cycle kept would be there fifty times; something else in this process may take a little.
    assert after[0] - before[0] <= 16 * MIB
    assert after[1] - before[1] < 25
    assert after[2] - before[2] < 25
    assert torch.equal(kept, torch.arange(kept.numel(), dtype=torch.float32))


def test_threads_allocate_while_another_pauses(arena: Arena) -> None:
    errors: list[BaseException] = []
    stop = threading.Event()
    refused = [0]

    def allocate_and_free() -> None:
        held: list[torch.Tensor] = []
        try:
            while not stop.is_set():
                try:
                    held.append(arena.allocate((1000,), tag="backup"))
                except TransitionRefused:
                    refused[0] += 1
                if len(held) > 50:
                    held.clear()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=allocate_and_free) for _ in range(3)]
    kept = filled(arena, 8, "backup")
    for thread in threads:
        thread.start()
    for _ in range(100):
        arena.pause()
        # One reader that must never see a half-moved state.
        assert arena.paused
        assert arena.backup_view(kept)[77] == 77
        stop.wait(0.001)
        arena.resume()
    stop.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert errors == []
    assert refused[0] > 0
    assert torch.equal(kept, torch.arange(kept.numel(), dtype=torch.float32))
    assert arena.allocated_bytes() == 8 * MIB


def test_concurrent_transitions_leave_one_truth(arena: Arena) -> None:
    kept = filled(arena, 8, "backup")
    threads = [threading.Thread(target=call) for call in [arena.pause, arena.resume] * 20]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    arena.resume()
    assert torch.equal(kept, torch.arange(kept.numel(), dtype=torch.float32))


def test_a_forked_child_does_not_get_the_ranges(arena: Arena) -> None:
    kept = filled(arena, 4, "backup")
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        kept[0].item()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGSEGV
    assert kept[5] == 5


def test_close_waits_for_the_last_tensor(arena: Arena) -> None:
    tensor = arena.allocate((8,))
    with pytest.raises(TransitionRefused, match="1 tensors still live"):
        arena.close()
    del tensor
    arena.close()
    arena.close()
    with pytest.raises(MemorySaverBroken, match="closed"):
        arena.pause()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="reserve_bytes: 0"):
        Arena(0)
    arena = Arena(64 * MIB)
    with pytest.raises(ValueError, match="keep"):
        arena.allocate((3,), tag="keep")
    with pytest.raises(OSError, match="reserving"):
        Arena(1 << 60)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
