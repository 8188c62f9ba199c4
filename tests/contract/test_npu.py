"""Start-up checks, sleep, wake and sharing on torch_npu's own wheel, over stand-ins for CANN."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from cann.build import Cann
from contracts import Kind, Source
from register import CONTRACTS
from support.samples import drawn
from support.warm.client import WarmProcess
from support.warm.protocol import NPU

HERE = Path(__file__).parent
Done = subprocess.CompletedProcess[str]
SCENARIO = str(HERE / "scenario.py")


def environment(cann: Cann, mode: str, **changed: str | None) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    places = [*cann.path, str(HERE.parent / "worker" / "weightsync")]
    path = os.pathsep.join([*places, *(entry for entry in sys.path if entry and entry != str(HERE))])
    merged = own | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | cann.environment(mode) | changed
    return {name: value for name, value in merged.items() if value is not None}


def run(cann: Cann, name: str, mode: str = "preload", **changed: str | None) -> Done:
    """A scenario in a fork of a process that has imported torch_npu with this mode; variables change in the fork.

    A library is preloaded when an interpreter starts: with another LD_PRELOAD it is a new one.
    """
    changes = [variable if value is None else f"{variable}={value}" for variable, value in changed.items()]
    if "LD_PRELOAD" in changed:
        command, env = [sys.executable, SCENARIO, name], environment(cann, mode, **changed)
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    with tempfile.TemporaryDirectory(prefix="rljob-test-") as folder:
        errors = Path(folder) / "errors"
        command = [SCENARIO, name, *changes]
        process = WarmProcess(NPU, command, environment(cann, mode), errors=errors)
        try:
            output, _ = process.communicate(300)
        finally:
            process.kill()
        return Done(command, process.wait(), output, errors.read_text())


def said(done: Done) -> list[str]:
    """Words of the last line: torch_npu prints a warning to standard output when it is imported."""
    return (done.stdout.splitlines() or [""])[-1].split()


REFUSALS = {
    "wrong path": ({"LD_PRELOAD": "/nowhere/torch_memory_saver.so"}, "library: found none in /proc/self/maps"),
    "not enabled": ({"TMS_INIT_ENABLE": None}, "tracking: found TMS_INIT_ENABLE='', main thread not tracked"),
    "inert": ({"SAVER_INERT": "1"}, "sleep and wake: found 0 bytes given back"),
}
"""One of each kind: all faults of the environment are distinguished in tests/worker/memory/test_torch_saver.py."""
TOUCHED = drawn("what sleeps is touched", ["touch", "cached"])
REFUSED = drawn("memory savers that are refused", list(REFUSALS))
ENDS = {"short": "alive", "threads": "apart"}
ENDED_WELL = drawn("short memory, threads", list(ENDS))
# It fills the device's memory twice, and a small one is full sooner.
ALIVE = {"short": {"NPU_HBM_BYTES": str(512 * 2**20)}}
UUID = "d0000000-0000-0000-0000-000000000006"
"""UUID of device 5."""


@pytest.fixture(scope="session")
def outcomes(cann: Cann) -> Iterator[dict[str, Future[Done]]]:
    """All scenarios of one process, as many at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # A new interpreter, as a trainer is: torch_npu says while it is imported how it finds the library.
        library = cann.environment("preload")["LD_PRELOAD"]
        runs = {"cycle preload": pool.submit(run, cann, "cycle", "preload", CALLED="1", LD_PRELOAD=library)}
        runs |= {"cycle torch": pool.submit(run, cann, "cycle", "torch", NPU_WITHOUT_UUID="1", CALLED="1")}
        runs |= {name: pool.submit(run, cann, name, **ALIVE.get(name, {})) for name in (*TOUCHED, "twice", *ENDED_WELL)}
        runs |= {case: pool.submit(run, cann, "check", **REFUSALS[case][0]) for case in REFUSED}
        yield runs


@pytest.mark.parametrize(("mode", "identity"), [("preload", UUID), ("torch", "5")])
def test_verified_sleep_and_wake(outcomes: dict[str, Future[Done]], mode: str, identity: str) -> None:
    """The driver of the second one reports no uuid: torch_npu says zeros, and the physical number counts."""
    done = outcomes[f"cycle {mode}"].result()
    assert done.returncode == 0, done.stderr
    assert said(done) == ["identity", f"{socket.gethostname()}:npu:{identity}", "5", "cpu:gloo,npu:hccl"]


def test_what_the_register_calls_executed_is_called(outcomes: dict[str, Future[Done]]) -> None:
    cycles = [outcomes[f"cycle {mode}"].result().stderr for mode in ("preload", "torch")]
    called = {name for text in cycles for name in text.splitlines()[-1].split()}
    here = [c for c in CONTRACTS if c.executed and c.source is Source.TORCH_NPU]
    named = {c.plain for c in here if c.kind is Kind.FUNCTION or c.name.startswith("_npu_")}
    # The test of shared tensors calls it, the one of short memory the limit, and jobs the rest.
    elsewhere = {"rebuild_npu_tensor", "set_per_process_memory_fraction"}
    # The test of an offloaded state.
    elsewhere |= {"current_stream", "Stream", "stream", "wait_stream", "record_event", "wait"}
    of_jobs = {"npu_fusion_attention_forward", "npu_swiglu_meta", "get_rng_state"}
    assert named - called == elsewhere | of_jobs
    assert "LD_PRELOAD detected, FunctionLoader prefers RTLD_DEFAULT" in cycles[0]


@pytest.mark.parametrize("name", TOUCHED)
def test_touching_what_sleeps_ends_the_process(outcomes: dict[str, Future[Done]], name: str) -> None:
    done = outcomes[name].result()
    assert (done.returncode, said(done)[:1]) == (-signal.SIGSEGV, ["paused"]), done.stderr


@pytest.mark.parametrize("name", ENDED_WELL)
def test_memory_is_refused_by_torch_and_pools_are_of_one_thread(outcomes: dict[str, Future[Done]], name: str) -> None:
    done = outcomes[name].result()
    assert (done.returncode, said(done)) == (0, [ENDS[name]]), done.stderr


def test_the_library_ends_the_process_when_paused_twice(outcomes: dict[str, Future[Done]]) -> None:
    """Why MemorySaver stands in front of it."""
    done = outcomes["twice"].result()
    assert (done.returncode, said(done)[:1]) == (1, ["paused"]), done.stderr
    assert "aclrtUnmapMem failed" in done.stderr


@pytest.mark.parametrize("case", REFUSED)
def test_a_memory_saver_that_would_not_work_is_refused_before_anything_is_built(
    outcomes: dict[str, Future[Done]], case: str
) -> None:
    done = outcomes[case].result()
    assert done.returncode == 1
    assert REFUSALS[case][1] in done.stderr, done.stderr


def test_an_offloaded_state_goes_through_two_buffers_beside_what_is_computed(cann: Cann) -> None:
    done = run(cann, "offload", CALLED="1")
    assert (done.returncode, said(done)) == (0, ["same"]), done.stderr
    called = set(done.stderr.splitlines()[-1].split())
    assert {"current_stream", "stream", "Stream.wait_stream", "Stream.record_event", "Event.wait"} <= called


def test_a_shared_tensor_crosses_processes_while_the_rest_sleeps(cann: Cann) -> None:
    """By torch_npu's own reductions: key of the memory, counter in shared memory, event."""
    shared, received = of_trainer_and_engine(cann, "share", "receive")
    assert (received.returncode, said(received)) == (0, ["received"]), received.stderr
    assert f":npu:{UUID}" in received.stdout
    assert (shared.returncode, said(shared)) == (0, ["seen"]), shared.stderr


def test_weights_cross_from_a_trainer_that_sleeps_in_between_to_an_engine(cann: Cann) -> None:
    """The whole weight sync on the device's own slots: exported once, opened by another process, verified there."""
    sent, landed = of_trainer_and_engine(cann, "send", "land")
    assert (landed.returncode, said(landed)[:1]) == (0, ["landed"]), landed.stderr
    assert sent.returncode == 0, sent.stderr
    assert int(said(sent)[1]) > 3, "several buckets, so both slots are used again"


def of_trainer_and_engine(cann: Cann, trainers: str, engines: str) -> tuple[Done, Done]:
    """Scenarios of two processes side by side; the engine's has another list of devices, no memory saver, and the same
    physical device."""
    with tempfile.TemporaryDirectory(prefix="rljob-test-") as folder, ThreadPoolExecutor() as pool:
        place = {"NPU_FOLDER": folder, "SYNC_FOLDER": folder}
        trainer = pool.submit(run, cann, trainers, "preload", **place)
        engine = pool.submit(run, cann, engines, "torch", ASCEND_RT_VISIBLE_DEVICES="5,6", **place)
        return trainer.result(), engine.result()


@pytest.mark.parametrize("mode", drawn("modes of a process", ["preload", "torch"]))
def test_the_doctor_sees_whether_a_process_is_hooked(cann: Cann, mode: str) -> None:
    """The checks on devices are in test_npu_doctor.py."""
    command = [sys.executable, "-m", "rljob_worker.doctor.process"]
    env = environment(cann, mode)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["hooked"] is (mode == "preload")
