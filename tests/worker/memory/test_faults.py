"""System calls that fail at every possible place, on real pages: the arena rolls back or says that it is broken."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rljob_worker.devices.cpu import CpuDevice
from rljob_worker.memory.arena import Arena
from rljob_worker.memory.states import MemorySaver, MemorySaverBroken, MemorySaverState
from rljob_worker.memory.virtual import HUGE_PAGE, PROT_READ, PROT_WRITE, VirtualMemory

MIB = 1024 * 1024


class FailingMemory(VirtualMemory):
    """The real calls, except those whose number is in `failing`."""

    def __init__(self) -> None:
        self.count = 0
        self.failing: set[int] = set()

    def _call(self) -> None:
        self.count += 1
        if self.count in self.failing:
            raise OSError(errno.ENOMEM, "injected")

    def fail_next(self, *steps: int) -> None:
        self.count, self.failing = 0, set(steps)

    def protect(self, address: int, length: int, protection: int) -> None:
        self._call()
        super().protect(address, length, protection)

    def move(self, source: int, target: int, length: int) -> None:
        self._call()
        super().move(source, target, length)

    def drop(self, address: int, length: int) -> None:
        self._call()
        super().drop(address, length)


def calls_of(arena: Arena, memory: FailingMemory, transition: str) -> int:
    memory.fail_next()
    getattr(arena, transition)()
    return memory.count


def rights(base: int, capacity: int) -> set[str]:
    """Access rights of the mappings that touch the addresses."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start < base + capacity and base < end:
            found.add(line.split()[1])
    return found


def open_ranges(arena: Arena) -> tuple[set[str], set[str], set[str]]:
    """Rights other than none of the kept range, the discarded range and the backup."""
    keep, drop = arena._keep, arena._drop
    bases = (keep.base, drop.base, keep.backup_base)
    kept, dropped, backup = (rights(base, keep.capacity) - {"---p"} for base in bases)
    return kept, dropped, backup


AWAKE = ({"rw-p"}, {"rw-p"}, set())
ASLEEP = (set(), set(), {"r--p"})


def test_every_step_that_fails_is_undone() -> None:
    memory = FailingMemory()
    arena = Arena(256 * MIB, memory=memory)
    kept, dropped = arena.allocate((40 * MIB,)), arena.allocate((MIB,), tag="discard")
    kept.fill_(5)
    steps = {name: calls_of(arena, memory, name) for name in ("pause", "resume")}
    assert min(steps.values()) >= 4
    dropped.fill_(6)
    for step in range(1, steps["pause"] + 1):
        memory.fail_next(step)
        with pytest.raises(OSError, match="injected"):
            arena.pause()
        assert not arena.paused
        assert open_ranges(arena) == AWAKE, f"step {step}"
        assert (kept[0], kept[-1], dropped[0], dropped[-1]) == (5, 5, 6, 6), f"step {step}"
        kept[-1] = 5
    memory.fail_next()
    arena.pause()
    for step in range(1, steps["resume"] + 1):
        memory.fail_next(step)
        with pytest.raises(OSError, match="resume failed and was undone"):
            arena.resume()
        assert arena.paused
        assert open_ranges(arena) == ASLEEP, f"step {step}"
        assert arena.resident_bytes() == 0
        assert arena.backup_view(kept)[-1] == 5
    memory.fail_next()
    arena.resume()
    assert open_ranges(arena) == AWAKE
    assert torch.equal(kept, torch.full_like(kept, 5))


def test_a_rollback_that_fails_breaks_the_arena_for_good() -> None:
    memory = FailingMemory()
    arena = Arena(64 * MIB, memory=memory)
    arena.allocate((MIB,)).fill_(1)
    calls_of(arena, memory, "pause")
    last = calls_of(arena, memory, "resume")
    arena.pause()
    saver = MemorySaver(arena, CpuDevice())
    memory.fail_next(last, last + 1)
    with pytest.raises(MemorySaverBroken, match="could not be undone"):
        saver.resume()
    assert saver.state is MemorySaverState.BROKEN
    memory.fail_next()
    for attempt in (saver.resume, saver.pause, arena.resume, arena.pause, lambda: arena.allocate((1,))):
        with pytest.raises(MemorySaverBroken, match="could not be undone"):
            attempt()


def test_a_failed_move_leaves_its_target_reserved() -> None:
    memory = VirtualMemory()
    source, target = memory.reserve(4 * HUGE_PAGE), memory.reserve(4 * HUGE_PAGE)
    memory.protect(source, 2 * HUGE_PAGE, PROT_READ | PROT_WRITE)
    memory.release(source, 4 * HUGE_PAGE)
    with pytest.raises(OSError, match="moving 4194304 bytes"):
        memory.move(source, target, 2 * HUGE_PAGE)
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    covered = [(int(start, 16), int(end, 16)) for start, end in spans]
    for page in range(target, target + 4 * HUGE_PAGE, HUGE_PAGE):
        assert any(start <= page < end for start, end in covered)
    memory.release(target, 4 * HUGE_PAGE)


class ArenaMachine(RuleBasedStateMachine):
    """Allocations, writes, frees and transitions with failing system calls, against a plain model of the contents."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = FailingMemory()
        self.arena = Arena(512 * MIB, memory=self.memory)
        self.saver = MemorySaver(self.arena, CpuDevice())
        self.paused = False
        self.tensors: list[tuple[torch.Tensor, str]] = []
        self.values: list[int] = []

    @precondition(lambda self: not self.paused and len(self.tensors) < 8)
    @rule(kibibytes=st.integers(1, 20_000), tag=st.sampled_from(["backup", "discard"]))
    def allocate(self, kibibytes: int, tag: str) -> None:
        tensor = self.arena.allocate((kibibytes * 1024,), torch.uint8, tag)
        assert not tensor[:: max(1, len(tensor) // 64)].any()
        self.tensors.append((tensor, tag))
        self.values.append(0)

    @precondition(lambda self: not self.paused and self.tensors)
    @rule(index=st.integers(0, 7), value=st.integers(0, 255))
    def write(self, index: int, value: int) -> None:
        index %= len(self.tensors)
        self.tensors[index][0].fill_(value)
        self.values[index] = value

    @precondition(lambda self: self.tensors)
    @rule(index=st.integers(0, 7))
    def free(self, index: int) -> None:
        del self.tensors[index % len(self.tensors)], self.values[index % len(self.values)]

    @rule()
    def pause(self) -> None:
        assert self.saver.pause().changed is not self.paused
        self.paused = True

    @rule()
    def resume(self) -> None:
        assert self.saver.resume().changed is self.paused
        if self.paused:
            self.values = [0 if tag == "discard" else v for (_, tag), v in zip(self.tensors, self.values, strict=True)]
        self.paused = False

    @rule(step=st.integers(1, 12))
    def fail(self, step: int) -> None:
        self.memory.fail_next(step)
        transition = self.resume if self.paused else self.pause
        try:
            transition()
        except OSError:
            assert self.memory.count >= step
        finally:
            self.memory.fail_next()

    @invariant()
    def tells_the_truth(self) -> None:
        assert self.saver.state is (MemorySaverState.PAUSED if self.paused else MemorySaverState.ACTIVE)
        assert self.arena.paused is self.paused
        assert self.arena.allocated_bytes() == sum(tensor.numel() for tensor, _ in self.tensors)

    @invariant()
    def contents_are_intact(self) -> None:
        for (tensor, tag), value in zip(self.tensors, self.values, strict=True):
            if not self.paused or tag == "backup":
                seen = self.arena.readable(tensor)
                assert (int(seen[0]), int(seen[len(seen) // 2]), int(seen[-1])) == (value, value, value)

    def teardown(self) -> None:
        self.tensors.clear()
        self.arena.close()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=40, stateful_step_count=25, suppress_health_check=list(HealthCheck))
