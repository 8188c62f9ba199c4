"""The memory saver's state machine over backends that fail in every way."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rljob_worker.devices.cpu import CpuDevice
from rljob_worker.host.memory import MemoryInfo
from rljob_worker.memory.states import (
    MemorySaver,
    MemorySaverBackend,
    MemorySaverBroken,
    MemorySaverState,
    MemoryShortage,
    TransitionRefused,
)


class Backend:
    """Moves a flag; `fault` says how the next call goes wrong."""

    def __init__(self) -> None:
        self.paused = False
        self.fault: str | None = None
        self.calls: list[str] = []

    @property
    def paused_bytes(self) -> int:
        return 100 if self.paused else 0

    @property
    def backup_bytes(self) -> int:
        return 60 if self.paused else 0

    @property
    def resume_bytes(self) -> int:
        return 40 if self.paused else 0

    def pause(self) -> None:
        self._go("pause", True)

    def resume(self) -> None:
        self._go("resume", False)

    def _go(self, name: str, paused: bool) -> None:
        assert self.paused is not paused, "a backend is never asked twice"
        self.calls.append(name)
        if self.fault == "raise before":
            raise OSError("before")
        if self.fault == "do nothing":
            return
        if self.fault == "broken":
            raise MemorySaverBroken("half moved")
        self.paused = paused
        if self.fault == "raise after":
            raise OSError("after")


class SmallDevice(CpuDevice):
    """A CPU whose reading of free memory is given, and that notes when it was synchronized."""

    def __init__(self, calls: list[str], free: int = 1000) -> None:
        super().__init__()
        self.free = free
        self.calls = calls

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(self.free, 10_000)

    def synchronize(self) -> None:
        self.calls.append("synchronize")


def make(margin: int = 0, free: int = 1000) -> tuple[MemorySaver, Backend, SmallDevice]:
    backend = Backend()
    device = SmallDevice(backend.calls, free)
    return MemorySaver(backend, device, margin_bytes=margin), backend, device


def test_a_cycle_synchronizes_before_it_unmaps_and_reports_bytes() -> None:
    saver, backend, _ = make()
    assert isinstance(backend, MemorySaverBackend)
    down = saver.pause()
    assert backend.calls == ["synchronize", "pause"]
    assert (down.state, down.changed, down.moved_bytes, down.backup_bytes) == (MemorySaverState.PAUSED, True, 100, 60)
    again = saver.pause()
    assert (again.changed, again.moved_bytes) == (False, 0)
    up = saver.resume()
    assert (up.state, up.changed, up.moved_bytes) == (MemorySaverState.ACTIVE, True, 100)
    assert not saver.resume().changed
    assert backend.calls == ["synchronize", "pause", "resume"]


def test_resume_is_refused_when_memory_is_short() -> None:
    saver, backend, device = make(margin=30, free=69)
    saver.pause()
    with pytest.raises(MemoryShortage, match=r"needs 40 bytes and a margin of 30 bytes, but 69 bytes are free"):
        saver.resume()
    assert saver.state is MemorySaverState.PAUSED
    assert "resume" not in backend.calls
    device.free = 70
    assert saver.resume().changed


def test_a_device_that_cannot_finish_keeps_the_memory() -> None:
    saver, backend, device = make()

    def stuck() -> None:
        raise RuntimeError("device is stuck")

    device.synchronize = stuck  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="stuck"):
        saver.pause()
    assert saver.state is MemorySaverState.ACTIVE
    assert backend.calls == []


def test_require_names_what_was_asked_and_the_state() -> None:
    saver, _, _ = make()
    saver.require(MemorySaverState.ACTIVE, "train")
    saver.pause()
    with pytest.raises(TransitionRefused, match="train needs the memory saver ACTIVE; it is PAUSED"):
        saver.require(MemorySaverState.ACTIVE, "train")


def test_a_paused_backend_is_taken_over_as_paused() -> None:
    backend = Backend()
    backend.paused = True
    assert MemorySaver(backend, SmallDevice([])).state is MemorySaverState.PAUSED


def test_a_negative_margin_is_refused() -> None:
    with pytest.raises(ValueError, match="margin_bytes: -1"):
        make(margin=-1)


def test_the_state_waits_for_a_running_transition() -> None:
    saver, backend, _ = make()
    entered, leave = threading.Event(), threading.Event()
    real_pause = backend.pause

    def slow_pause() -> None:
        entered.set()
        assert leave.wait(60)
        real_pause()

    backend.pause = slow_pause  # type: ignore[method-assign]
    mover = threading.Thread(target=saver.pause)
    mover.start()
    assert entered.wait(60)
    seen: list[MemorySaverState] = []
    reader = threading.Thread(target=lambda: seen.append(saver.state))
    reader.start()
    reader.join(0.1)
    assert seen == []
    leave.set()
    reader.join(60)
    mover.join(60)
    assert seen == [MemorySaverState.PAUSED]


class SaverMachine(RuleBasedStateMachine):
    """Any sequence of transitions, faults and shortages: the state is what the backend is, or BROKEN for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.saver, self.backend, self.device = make(margin=10)
        self.broken = False

    @rule(
        name=st.sampled_from(["pause", "resume"]),
        fault=st.sampled_from([None, None, None, "raise before", "raise after", "do nothing", "broken"]),
        free=st.sampled_from([1000, 1000, 49]),
    )
    def transition(self, name: str, fault: str | None, free: int) -> None:
        self.backend.fault, self.device.free = fault, free
        was, calls = self.backend.paused, self.backend.calls.count(name)
        goal = name == "pause"
        error: Any = None
        try:
            result = getattr(self.saver, name)()
        except (OSError, MemorySaverBroken, MemoryShortage) as caught:
            error = caught
        asked = self.backend.calls.count(name) > calls
        if self.broken:
            assert isinstance(error, MemorySaverBroken)
            assert not asked
        elif was is goal:
            assert error is None
            assert not result.changed
            assert not asked
        elif not goal and free == 49:
            assert isinstance(error, MemoryShortage)
            assert not asked
        elif fault in ("do nothing", "broken"):
            assert isinstance(error, MemorySaverBroken)
            self.broken = True
        else:
            assert (error is None) is (fault is None)

    @invariant()
    def never_lies(self) -> None:
        if self.broken:
            assert self.saver.state is MemorySaverState.BROKEN
        else:
            assert self.saver.state is (MemorySaverState.PAUSED if self.backend.paused else MemorySaverState.ACTIVE)


TestSaverMachine = SaverMachine.TestCase
TestSaverMachine.settings = settings(max_examples=150, stateful_step_count=20)
